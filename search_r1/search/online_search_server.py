"""The name under which Search-R1's launcher for SerpAPI looks for serp_search_server.py."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("serp_search_server.py")), run_name=__name__)
