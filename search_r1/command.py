"""`search-r1 COMMAND ...`: one name for all that the project does.

    search-r1 train | ppo | sft | doctor    the shell scripts at the repository's root, with this Python
    search-r1 serve | index | data ...      their Python modules; `--help` after any of them
    search-r1 infer | convert | resume      scripts of the repository

What follows the command goes on as it is.
"""

from __future__ import annotations

import difflib
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SHELL = {
    "train": (["train_grpo.sh"], "GRPO; without arguments on the microworld"),
    "ppo": (["train_ppo.sh"], "PPO with a critic"),
    "sft": (["train_sft.sh"], "supervised training, before reinforcement learning"),
    "doctor": (["train_grpo.sh", "--doctor"], "what would spoil a run, before it starts"),
}
MODULES = {
    "serve": ("search_r1.search.server", "a retrieval server"),
    "index": ("search_r1.search.index_builder", "an index for the server"),
    "microworld": ("data_prep.microworld", "the microworld's rows and corpus"),
    "squad": ("data_prep.squad", "rows and a corpus from SQuAD files and passages"),
    "qa": ("data_prep.qa_search", "Search-R1's question sets"),
    "wiki18": ("data_prep.wiki18", "Search-R1's Wikipedia and its indexes"),
}
FILES = {
    "infer": ("infer.py", "ask a trained model"),
    "convert": ("scripts/convert_checkpoint.py", "a checkpoint to a Hugging Face folder, and back"),
    "resume": ("scripts/check_resume.py", "shows that a killed run ends like an undisturbed one"),
}


def usage() -> str:
    """The list of commands."""
    commands = {name: text for table in (SHELL, MODULES, FILES) for name, (_, text) in table.items()}
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {text}" for name, text in commands.items()]
    return "\n".join(["usage: search-r1 COMMAND [arguments]", "", *lines])


def main() -> None:
    """Runs the command that the command line names; exit status 2 if there is none of that name."""
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if name in ("-h", "--help"):
        print(usage())
        return
    if not (ROOT / "train_grpo.sh").is_file():
        sys.exit(f"error: {ROOT} is no checkout of the project; install with pip install -e .")
    if name in SHELL:
        script, *first = SHELL[name][0]
        # The scripts take an active environment as it is: this one, also when nobody has activated it.
        os.environ["VIRTUAL_ENV"] = os.environ.get("VIRTUAL_ENV") or sys.prefix
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        os.execvp("bash", ["bash", str(ROOT / script), *first, *arguments])
    elif name in MODULES:
        sys.argv = [f"search-r1 {name}", *arguments]
        runpy.run_module(MODULES[name][0], run_name="__main__")
    elif name in FILES:
        path = ROOT / FILES[name][0]
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")
    else:
        near = difflib.get_close_matches(name, [*SHELL, *MODULES, *FILES], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: found the command {name!r}{hint}\n{usage()}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
