"""The quantised linear family on tile128x64-v1: decode (1-64 columns per launch) and prefill."""
