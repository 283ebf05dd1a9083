"""Rows from a model: `python -m verl.synthesis` (docs/synthesis.md).

    python -m verl.synthesis --model verl_checkpoints/NAME --benchmarks data/new/train.parquet --rollouts 4
    python -m verl.synthesis --base_url http://host:port/v1 --model NAME --benchmarks rows.jsonl --keep best

    python -m verl.synthesis --model .. --corpus corpus.jsonl -n 1000       questions of its own, on passages

    rows -> rollouts, verified as in training -> demonstrations (train_sft.sh), rows (train_grpo.sh), the rest

It takes all options of `python -m verl.evaluation --help`; the rows go to --out (synthesized).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.evaluation.program import (
    build_parser,
    check_search,
    folders_of,
    print_servers,
    read_options,
    relative_results_path,
    run_command,
    settings_of,
)
from verl.plugins import hook
from verl.utils.logs import start_logging
from verl.utils.text import printable

if TYPE_CHECKING:
    from verl.evaluation.rollouts import Benchmark


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status.

    The status is that of `verl.evaluation`; it is 2 also if no rollout is kept.
    """
    parser = build_parser("python -m verl.synthesis", __doc__, "synthesized")
    parser.set_defaults(rollouts=4)
    add = parser.add_argument
    add("--corpus", type=Path, help="write questions on its passages first, -n of them, and ask these")
    add("--template", type=Path, help="with --corpus: prompt of a question, with {question} in it")
    add("--keep", default="passed", choices=("passed", "best", "all"), help="rollouts (passed)")
    add("--per_prompt", type=int, default=1, help="most demonstrations of an example (1)")
    add("--val_share", type=float, default=0.05, help="of the examples, for sft_val.parquet (0.05)")
    options = read_options(parser, argv)
    if (options.corpus is None) == (not options.benchmarks):
        parser.error("expected --benchmarks or --corpus, one of them")
    if options.corpus is not None and (options.n is None or options.steps or options.watch):
        parser.error("expected --corpus with -n, and without --steps and --watch")
    if options.template is not None and options.corpus is None:
        parser.error("expected --template with --corpus; rows of --benchmarks have their prompts")
    if options.per_prompt < 1 or not 0 <= options.val_share < 1:
        parser.error("expected --per_prompt of 1 or more, and --val_share from 0 to below 1")
    if options.servers:
        return print_servers(options, options.corpus)

    def write(benchmark: Benchmark, tokenizer: Any, model: str) -> None:
        from verl.synthesis.rows import choose, write_rows

        chosen, rejected = choose(benchmark.lines(), options.keep, options.per_prompt, options.solved_at)
        end_token = getattr(tokenizer, "eos_token", None)
        as_messages = options.base_url is not None and options.tokenizer is None
        rows = benchmark.dataset.rows
        shares = (options.val_share, options.seed, as_messages)
        for name, count in write_rows(
            chosen, rejected, rows, benchmark.folder, model, end_token, *shares
        ).items():
            print(f"{benchmark.folder / name}: {count:,} rows", flush=True)

    if options.corpus is not None:
        status = ask_for_questions(options)
        if status != 0:
            return status
    return run_command(options, write)


def ask_for_questions(options: argparse.Namespace) -> int:
    """Have the model write questions on passages of a corpus; they become `options.benchmarks`.

    Returns:
        The exit status.
    """

    def use(benchmark: Benchmark, tokenizer: Any, model: str) -> None:
        options.benchmarks = [corpus_questions.write_questions(benchmark.lines(), model, benchmark.folder)]

    try:
        corpus_questions = hook("corpus_questions")(options.template)
        folder = None if options.base_url else next(folders_of(options))
        check_search(settings_of(folder, options), True)  # before anything is paid for
        passages = corpus_questions.write_passages(options.corpus, options.n, options.seed, options.out)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    options.n = None
    results_folder = options.out / relative_results_path(folder, options.model)
    questions = corpus_questions.questions_file(results_folder / passages.stem)
    if options.resume and (results_folder / questions.stem / "results.jsonl").is_file():
        print(f"going on with {questions}", flush=True)
        options.benchmarks = [questions]
        return 0
    overrides = {"benchmarks": [passages], "rollouts": 1, "similarity": False, "encoder": None}
    return run_command(argparse.Namespace(**{**vars(options), **overrides}), use)


if __name__ == "__main__":
    start_logging("synthesis")
    sys.exit(main())
