"""Show what runs did, and what they do now (docs/monitor.md).

python -m verl.monitor --list [--num-runs 20]            the runs below a folder, the newest first
python -m verl.monitor RUN [RUN ...]                     figures, failed rollouts with their tags, pictures
python -m verl.monitor RUN [RUN ...] --watch             the same on the terminal, while they run
python -m verl.monitor RUN [RUN ...] --serve 8002        the same as a page that refreshes by itself
python -m verl.monitor --project P [--entity E] ...      all of this for the runs of a project on wandb
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from verl.monitor.runs import TABLE, Run, runs_below, share_of_tags
from verl.records.trajectories import write_page
from verl.utils.json_files import write_lines
from verl.utils.logs import start_logging
from verl.utils.text import printable

REFRESH_SECONDS = 2.0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.monitor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="folders of runs; with --project their names")
    add("--list", action="store_true", help="name the runs below --root, or of --project")
    add("--root", type=Path, default=Path("verl_checkpoints"), help="folder of runs (verl_checkpoints)")
    add("--project", help="of wandb, where the runs are then looked for")
    add("--entity", help="of wandb, whose project it is (that of the key)")
    add("--num-runs", type=int, default=20, help="most runs that --list names (20)")
    add("--save-dir", type=Path, help="for pictures and samples (RUN/monitor)")
    add("--reward-threshold", type=float, default=0.3, help="a rollout below it has failed (0.3)")
    add("--max-samples", type=int, default=20, help="failed rollouts that are kept (20)")
    add("--metrics-only", action="store_true", help="no rollouts")
    add("--samples-only", action="store_true", help="no figures and no pictures")
    add("--watch", action="store_true", help="figures on the terminal until Ctrl-C, or until all have ended")
    add("--serve", type=int, metavar="PORT", help="a page of all runs at http://127.0.0.1:PORT")
    return parser


def format_figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def figures(runs: list[Run]) -> Table:
    """Return a table with a column for each run, and a row for each figure that one of them has."""
    table = Table("")
    for run in runs:
        table.add_column(Text(printable(run.folder.name)))
    table.add_row("state", *(run.state for run in runs))
    table.add_row("step", *(str(run.step) for run in runs))
    table.add_row("last line", *(f"{run.age:,.0f} s ago" for run in runs))
    for name in TABLE:
        values = [run.last(name) for run in runs]
        if any(value is not None for value in values):
            table.add_row(name, *map(format_figure, values))
    return table


def print_whole(table: Table, console: Console) -> None:
    """Print a table whose cells are not broken, even if its lines are longer than the terminal's."""
    needed = Console(width=sys.maxsize).measure(table).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table)


def report(run: Run, options: argparse.Namespace, console: Console) -> None:
    """Print the figures and failed rollouts of one run, and draw its pictures."""
    folder = run.folder / "monitor"
    if options.save_dir is not None:
        folder = options.save_dir / run.folder.name if len(options.runs) > 1 else options.save_dir
    if not options.samples_only:
        console.print(figures([run]))
        for path in run.draw(folder):
            console.print(Text(printable(path)))
    if options.metrics_only:
        return
    samples, counts = run.failures(options.reward_threshold, options.max_samples)
    for name, number, tags in share_of_tags(counts):
        tag_text = ", ".join(f"{tag} {share:.1%}" for tag, share in tags) or "no tags"
        console.print(Text(printable(f"{name}: {number} rollouts kept; {tag_text}")))
    console.print(Text(f"{len(samples)} rollouts below a reward of {options.reward_threshold:g}:"))
    for sample in samples:
        answer = "" if sample.get("answer") is None else f" -> {sample['answer']}"
        line = f"  step {sample['step']}: {sample['question']}{answer} [{', '.join(sample['tags'])}]"
        console.print(Text(printable(line)))
    if samples:
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / "samples.jsonl", samples)
        file_name = "samples.jsonl"
        if "trajectory" in samples[0]:  # rows of wandb's tables have only the texts
            file_name = "samples.html"
            write_page(samples, folder / file_name, f"{run.folder.name}: failed rollouts")
        console.print(Text(printable(folder / file_name)))


def watch(folders: list[Path], open_run: Callable[[Path], Run], console: Console) -> None:
    """Show figures on the terminal until all runs have ended."""
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            runs = [open_run(folder) for folder in folders]
            live.update(Group(figures(runs), Text("Ctrl-C ends this, not the runs.", style="dim")))
            if not any(run.state == "running" for run in runs):
                return
            time.sleep(REFRESH_SECONDS)


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 for a mistake of the user."""
    parser = build_parser()
    console = Console(highlight=False)
    options = parser.parse_args(argv)
    if not options.list and not options.runs:
        parser.error("expected the folder of a run, or --list")
    if options.num_runs < 1:
        parser.error(f"--num-runs: found {options.num_runs}, expected 1 or more")
    open_run: Callable[[Path], Run] = Run
    newest: Callable[[int], list[Run]] = lambda count: runs_below(options.root)[:count]  # noqa: E731
    try:
        if options.project is not None:
            from verl.monitor.wandb_runs import run_openers

            open_run, newest = run_openers(options.project, options.entity)
        if options.list:
            table = Table("state", "step", "reward", "EM", "last line", Column("run", no_wrap=True))
            for run in newest(options.num_runs):
                cells = (
                    run.state,
                    str(run.step),
                    format_figure(run.last("reward")),
                    format_figure(run.last("EM")),
                )
                name = run.folder if options.project else run.folder.relative_to(options.root)
                table.add_row(*cells, f"{run.age / 3600:,.1f} h ago", Text(printable(name)))
            print_whole(table, console)
            return 0
        if options.serve is not None:
            from verl.monitor.page import serve

            serve(options.runs, options.serve, open_run)
        elif options.watch:
            watch(options.runs, open_run, console)
        else:
            for folder in options.runs:
                report(open_run(folder), options, console)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    start_logging("monitor")
    sys.exit(main())
