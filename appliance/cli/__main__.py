"""`python -m appliance.cli` is `ginfer`."""

from __future__ import annotations

from appliance.cli.main import main

main()
