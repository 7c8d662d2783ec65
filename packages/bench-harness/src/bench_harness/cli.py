"""The command line: one command per experiment, whose options are the fields of its ``Options``.

What measures and shows is imported by the command that needs it, so ``--help`` answers at once.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperGroup

from bench_harness import experiments, options, user_code
from bench_harness.core import TOLERANCE, Case
from bench_harness.experiments import Experiment
from bench_harness.store import Store, StoreError, replace_file

#: Exit codes beside 0: a case failed; wrong use or an unusable folder; Ctrl-C.
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

# The class of every wrong use. Some versions of typer bring their own click, others use the
# installed one; either way it is the parent of a class that typer exports.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print the results as JSON, and nothing else, to stdout.")
]
PresetOrFile: TypeAlias = Annotated[
    str,
    typer.Argument(
        help=f"One of {', '.join(options.shipped())}, or a file NAME.toml.", show_default=False
    ),
]
#: Name of a run, its cases, the options of each experiment, and the preset as typed, if any.
_Plan: TypeAlias = tuple[str, Sequence[Case], Sequence[tuple[str, dict[str, Any]]], str | None]
PageFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--page", help="Also write a page with timelines, NAME.html.", show_default=False),
]
RunFolder: TypeAlias = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]


class _Commands(TyperGroup):
    """An unknown command is answered by the valid names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            valid = ", ".join(self.list_commands(ctx))
            raise ValueError(f"command must be one of {valid}, but got {args[0]!r}")
        return super().resolve_command(ctx, args)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    0: done. 1: a case failed. 2: wrong use, or a folder that cannot be used. 130: interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = application(given)(args=given, prog_name="bench-harness", standalone_mode=False)
    except _UsageError as error:
        return _complain(error.format_message())
    except (ValueError, StoreError) as error:
        return _complain(str(error))
    except OSError as error:  # a full disk or a missing permission, wherever it shows
        return _complain(f"{error.filename or 'system'}: {error.strerror}")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code or 0


def _complain(message: str) -> int:
    """Prints an error as one line on standard error, even if its message has several."""
    typer.echo("bench-harness: " + " ".join(message.split()), err=True)
    return BAD_INPUT


def application(given: Sequence[str]) -> typer.Typer:
    """A command for every experiment, and those for runs; ``run.json`` keeps what was ``given``."""
    app = typer.Typer(
        cls=_Commands,
        rich_markup_mode=None,
        # As wide as the terminal, but not wider than lines are comfortable to read.
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
        help="Measures and explains Transformer training: one command per experiment, one report.",
    )
    app.callback()(_root)
    # The one that is asked for; all of them for help, completion, and other commands.
    asked = [name for name in given[:1] if name in experiments.names()]
    for experiment in map(experiments.get, asked or experiments.names()):
        command = _experiment_command(experiment, given)
        app.command(experiment.name, help=_help(experiment))(command)
    text = "Run all experiments of a preset and write one report."
    app.command("run", help=text)(_run_command(given))
    for name, function in _OTHERS.items():
        app.command(name)(function)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from bench_harness import environment

        typer.echo(f"bench-harness {environment.package_version('bench-harness')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def _help(experiment: Experiment) -> str:
    """What ``--help`` says above the options; the first paragraph is the line in the list."""
    paragraphs = [f"{experiment.summary}.", experiment.guide]
    if experiment.examples:
        # A backspace alone on its line keeps the lines of its paragraph as they are.
        shown = [f"  bench-harness {example}" for example in experiment.examples]
        paragraphs.append("\n".join(["\b", "Examples:", *shown]))
    return "\n\n".join(filter(None, paragraphs))


def _experiment_command(experiment: Experiment, given: Sequence[str]) -> Callable[..., int]:
    """A command whose signature is made from the experiment's options."""

    def plan(context: typer.Context, **texts: Any) -> _Plan:
        values = options.build(experiment, texts, written=True)
        sources = {name: context.get_parameter_source(name) for name in texts}
        written = [n for n, source in sources.items() if source and source.name == "COMMANDLINE"]
        user_code.refuse_ignored(values, written)
        return experiment.name, experiment.cases(**values), [(experiment.name, values)], None

    context = inspect.Parameter("context", _KEYWORD, annotation=typer.Context)
    return _measuring(plan, [*options.parameters(experiment), context], given)


def _run_command(given: Sequence[str]) -> Callable[..., int]:
    def plan(preset: str) -> _Plan:
        chosen = options.load_preset(preset)
        return chosen.name, chosen.cases(), chosen.runs, preset

    asked = inspect.Parameter("preset", _KEYWORD, annotation=PresetOrFile)
    return _measuring(plan, [asked], given)


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _measuring(
    plan: Callable[..., _Plan], own: Sequence[inspect.Parameter], given: Sequence[str]
) -> Callable[..., int]:
    """A command that measures what ``plan`` makes of its own parameters."""

    def command(**values: Any) -> int:
        shared = {each.name: values.pop(each.name) for each in every_run}
        return _measure(plan(**values), given, **shared)

    known = inspect.signature(_measure, eval_str=True).parameters.values()
    every_run = [each for each in known if each.kind == _KEYWORD]
    every = [*own, *every_run]
    command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in every}
    return command


def _measure(
    planned: _Plan,
    given: Sequence[str],
    *,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Run folder; one that holds results is resumed. Default: runs/NAME-NN.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            metavar="TEXT,...",
            help="Only these experiments, or cases whose label holds a text.",
            show_default=False,
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cases and their time so far; run nothing.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, max=1e6, help="Seconds per case, not its own.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """What every command does that measures."""
    from rich.console import Console

    from bench_harness import session

    name, cases, chosen, preset = planned
    if not cases:
        raise ValueError("options must give at least one case, but got none. Name a size.")
    if output is not None and not output.strip():
        raise ValueError(f"--output must be a folder, but got {output!r}. Name one.")
    request = session.Request(
        name=name,
        cases=user_code.identified(cases),
        options=chosen,
        command=given,
        preset=preset,
        output=None if output is None else Path(output),
        only=[item.strip() for item in only.split(",") if item.strip()],
        timeout_s=timeout,
    )
    if dry_run:
        session.dry_run(request, Console(), as_json=as_json)
        return 0
    console, tables = Console(stderr=as_json), preset is None and not as_json
    return 0 if session.measure(request, console, tables=tables, as_json=as_json) else FAILED


def _report(run: RunFolder, as_json: AsJson = False) -> int:
    """Rebuild a run's report from its saved rows."""
    from rich.console import Console

    from bench_harness import session

    session.write_report(Store(run), Console(stderr=as_json), tables=False, as_json=as_json)
    return 0


def _compare(
    run_a: RunFolder,
    run_b: RunFolder,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of A's time that counts as the same.")
    ] = TOLERANCE,
    across_hardware: Annotated[
        bool, typer.Option("--across-hardware", help="Compare different machines, and mark it.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="slower[:PERCENT][,unsure]",
            help="Exit with 1 if a row of B is slower by more than so much (5), if a case is in "
            "one run alone, or, with unsure, if a row may be slower.",
            show_default=False,
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a summary for a pull request.")
    ] = False,
    page: PageFile = None,
    as_json: AsJson = False,
) -> int:
    """Say whether run B is faster or slower than A."""
    from rich.console import Console

    from bench_harness import compare, terminal
    from bench_harness.report import comparison

    if as_json and markdown:
        raise ValueError("output must be --json or --markdown, but got both. Leave one out.")
    gate = None if fail_on is None else compare.Gate.parse(fail_on)
    found = compare.compare(
        Store(run_a), Store(run_b), tolerance=tolerance, across_hardware=across_hardware
    )
    failures = [] if gate is None else gate.failures(found)
    if page is not None:
        _write_page(page, comparison.page(found, None if gate is None else failures))
    if as_json:
        typer.echo(json.dumps({**found.as_json(), "gate": failures}))
    elif markdown:
        typer.echo(comparison.markdown(found))
    else:
        terminal.comparisons(found, Console(), None if gate is None else failures)
    return FAILED if failures else 0


def _write_page(page: Path, text: str) -> None:
    """Writes a page, but not over rows or a recording."""
    if page.suffix != ".html":
        raise ValueError(f"--page must be a file NAME.html, but got {page}. Add .html.")
    replace_file(page, text)


def _serve(run: RunFolder) -> int:
    """Open a run's traces in Perfetto.

    It serves them over the loopback, until Ctrl-C.
    """
    from bench_harness import serve

    found = serve.traces(Store(run))
    with serve.TraceServer({path: file for path, (_, file) in found.items()}) as server:
        for path, (label, _) in found.items():
            typer.echo(f"{label}\n  {server.link(path)}")
        typer.echo("Open a link in a browser of this machine. Ctrl-C ends.")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _trace(
    files: Annotated[
        list[Path], typer.Argument(help="Recordings, one of each rank.", show_default=False)
    ],
    page: PageFile = None,
    as_json: AsJson = False,
) -> int:
    """Analyse recordings of any program.

    Shows overlap, kernels and late gathers. Reads torch.profiler traces (.json, .json.gz) and
    Nsight Systems (.nsys-rep, .sqlite). Runs nothing.
    """
    from rich.console import Console

    from bench_harness import terminal
    from bench_harness.display.timelines import timelines
    from bench_harness.report.write import records, rendered
    from bench_harness.traces import recordings

    found = [recording for file in files for recording in recordings.load(file)]
    tables = recordings.tables(found)
    if page is not None:
        lines = timelines({each["recording"]: each["timeline"] for each in found})
        title = ", ".join(lines)
        _write_page(page, rendered("trace.html.jinja", title=title, lines=lines, tables=tables))
    if as_json:
        typer.echo(json.dumps(records(tables), allow_nan=False))
    else:
        terminal.tables(tables, Console())
    return 0


def _env(as_json: AsJson = False) -> int:
    """Show this machine as results record it."""
    from bench_harness import environment

    description = environment.describe()
    shown = {"environment id": environment.fingerprint(description), **description}
    typer.echo(json.dumps(shown, indent=None if as_json else 2, ensure_ascii=False))
    return 0


def _preset(
    name: Annotated[
        str, typer.Argument(help=f"One of {', '.join(options.shipped())}.", show_default=False)
    ],
) -> int:
    """Print a preset's file, to copy and change.

    bench-harness preset quick > mine.toml; bench-harness run mine.toml
    """
    typer.echo(options.preset_text(name), nl=False)
    return 0


_OTHERS: dict[str, Callable[..., int]] = {
    "report": _report,
    "compare": _compare,
    "serve": _serve,
    "trace": _trace,
    "preset": _preset,
    "env": _env,
}
