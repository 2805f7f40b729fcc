"""The demo package as data: a tiny trained model for trying and testing."""
