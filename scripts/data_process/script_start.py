"""Start `data_prep.qa_search` as the script of Search-R1 that imports this, from any folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_prep.qa_search import main  # noqa: E402

sys.exit(main(Path(sys.argv[0]).stem))
