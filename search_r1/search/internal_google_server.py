"""The name under which Search-R1's launcher for Google looks for google_search_server.py."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("google_search_server.py")), run_name=__name__)
