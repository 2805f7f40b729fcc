"""Requests to rounds to tokens: the engine, its events and its configuration."""
