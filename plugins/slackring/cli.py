"""The command line. Everything heavy is imported inside the commands, so that ``--help`` answers at once."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slackring import __version__
from slackring.errors import OutputError, RingError, SlackringError, SpecError

if TYPE_CHECKING:
    from rich.console import Console

    from slackring.lab.checkpoint import Earlier, RunFolder
    from slackring.lab.config import TrainConfig
    from slackring.lab.runs import Run
    from slackring.lab.supersteps import Times
    from slackring.ring.base import Ring

__all__ = ["main"]

F = TypeVar("F", bound=Callable[..., Any])

_WORKERS = 4
_LIMIT = 20.0  # seconds of a run, if no limit is given
_HEAD_START = 0.5  # seconds; launchers end all ranks once one has failed, and rank 0 is to say why before that


def _numbers(kind: type[int] | type[float]) -> Callable[[click.Context, click.Parameter, str], tuple[int | float, ...]]:
    def read(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int | float, ...]:
        try:
            return tuple(kind(part) for part in text.split(",") if part.strip())
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise click.BadParameter(f"{text!r} is not {what} joined by commas.") from None

    return read


def _added(options: Sequence[Callable[[F], F]], command: F) -> F:
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def _training(command: F) -> F:
    """Add the options of all commands that train."""
    options = [
        click.option("--task", default="mnist5k", show_default=True, help="mnist5k, digits, or package.module:function."),
        click.option("--straggler", default="none", show_default=True, help="Who is slow, e.g. persistent:ranks=3,factor=4."),
        click.option("--network", default="none", show_default=True, help="What a round costs, e.g. latency=0.01,bandwidth=1e9."),
        click.option("--compression", default="none", show_default=True, help="How contributions travel: none or fp16."),
        click.option("--step-time", type=float, help="Seconds to fill a local step up to, by sleep (virtual, compare: 0.1)."),
        click.option("--batch-size", type=int, default=32, show_default=True, help="Samples in a rank's micro-batch."),
        click.option("--momentum", type=float, default=0.0, show_default=True, help="Momentum of SGD."),
        click.option("--seconds", type=float, help=f"End after this many seconds of training ({_LIMIT:g} if no limit is given)."),
        click.option("--samples", type=float, help="End after this many samples of all ranks."),
        click.option("--rounds", type=int, help="End after this many rounds."),
        click.option("--target", type=float, default=0.88, show_default=True, help="Accuracy whose first reaching is timed."),
        click.option("--out", type=click.Path(path_type=Path), default="runs", show_default=True, help="Where results go."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
    ]  # fmt: skip
    return _added(options, command)


def _ranks(command: F) -> F:
    """Add the options that say how many ranks there are, and of which kind."""
    options = [
        click.option(
            "--workers", type=int, help=f"Number of ranks, unless a launcher or a cluster has them ({_WORKERS})."
        ),
        click.option("--virtual", is_flag=True, help="Virtual ranks under a virtual clock: no Horovod, no waiting."),
    ]
    return _added(options, command)


def _on_cluster(command: F) -> F:
    """Add the options of commands that can train on a Dask cluster."""
    options = [
        click.option("--cluster", default="", metavar="FILE|ADDRESS",
                     help="Dask cluster: a file, or tcp://HOST:PORT; else this machine."),
        click.option("--wait", type=click.FloatRange(0, min_open=True), default=100.0, show_default=True,
                     help="Seconds to wait for the cluster's workers, and for ranks to start on them."),
    ]  # fmt: skip
    return _added(options, command)


def _one_run(command: F) -> F:
    """Add the options of commands that train one run, the rule aside."""
    options = [
        click.option("--lr", type=float, help="Of SGD. Default: 0.2, times the ranks for rules that send gradients (bsp)."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the model, the batches and the straggler."),
        click.option("--resume", type=click.Path(path_type=Path), metavar="RUN",
                     help="Go on with this run, its settings and clock. Limits, its own or new ones, count from its start."),
        click.option("--checkpoint-every", type=float, help="Seconds between checkpoints; there is one at the end anyway."),
    ]  # fmt: skip
    return _added(options, command)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="slackring")
def cli() -> None:
    """Relaxed synchronisation for data-parallel training over Horovod.

    \b
    Example:
      slackring compare --rules bsp,losp --straggler persistent:ranks=3,factor=4 --step-time 0.1 --virtual
    """


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def doctor(as_json: bool) -> None:
    """Check this machine: Python, PyTorch, Horovod, network, cores; and reduce once over two ranks.

    \b
    Example:
      slackring doctor
    """
    import dataclasses

    from rich.console import Console

    from slackring.doctor import examine, exit_status, report

    checks = list(examine())
    if as_json:
        click.echo(json.dumps({"checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    else:
        report(checks, Console())
    sys.exit(exit_status(checks))


@cli.command()
@click.option(
    "--rule", help="Synchronisation rule, e.g. bsp, or losp:k_max=16,compensation=0.5; --virtual: also server/asp."
)
@_one_run
@_ranks
@_training
def train(
    rule: str | None,
    lr: float | None,
    resume: Path | None,
    checkpoint_every: float | None,
    out: Path,
    as_json: bool,
    virtual: bool,
    workers: int | None,
    **values: Any,
) -> None:
    """Train one model under one rule; on the ranks that horovodrun or torchrun start, else on one rank.

    SIGTERM and SIGUSR1 to any rank end the run on all ranks after the same round, with all results and a checkpoint, and exit
    code 0; Ctrl-C does the same with 130. What is in flight then is landed, so that only rules with nothing in flight (bsp,
    local_sgd) go on as if they had not been interrupted. From the checkpoints of --checkpoint-every, named RUN-roundN, which a
    killed run leaves behind, every rule that counts steps does, on as many ranks as before.

    \b
    Examples:
      horovodrun --gloo -np 4 slackring train --rule losp --straggler persistent:ranks=3,factor=4 --step-time 0.1
      torchrun --nproc-per-node 4 -m slackring train --rule losp --straggler persistent:ranks=3,factor=4 --step-time 0.1
      slackring train --virtual --workers 4 --rule losp --straggler persistent:ranks=3,factor=4
      horovodrun --gloo -np 4 slackring train --resume runs/20261129-211929-losp-seed0-2bba --seconds 60
    """
    _check_resumption(rule, resume)

    from slackring.lab.agree import on_every_rank
    from slackring.lab.checkpoint import Checkpoints, RunFolder
    from slackring.lab.config import TrainConfig
    from slackring.lab.interrupt import Interrupt
    from slackring.lab.progress import ProgressBar
    from slackring.lab.runs import check_writable
    from slackring.lab.train import inject, train_virtual
    from slackring.lab.train import train as train_rank

    def take_up() -> tuple[Earlier | None, str]:
        """Read the run to continue where its folder is seen for sure: on rank 0."""
        if resume is None or ring.rank != 0:
            return None, ""
        earlier, config = _take_up(resume, virtual, values)
        return earlier, json.dumps(config.to_json())

    def configure() -> tuple[TrainConfig, RunFolder, Checkpoints]:
        if continued:
            config = TrainConfig.from_json(continued)
        else:
            config = TrainConfig(rule=rule or "", lr=lr, **_filled(values, virtual))
        if not virtual and workers not in (None, ring.size):
            raise SpecError(
                f"--workers is {workers}, but this is {ring.size} of them; start them with 'horovodrun --gloo -np {workers} "
                "slackring train ...', or add --virtual."
            )
        if ring.rank == 0:
            check_writable(out)
        folder = RunFolder(out, _new_run(config))
        return config, folder, Checkpoints(checkpoint_every, folder.keep)

    with Interrupt() as interrupt:
        ring = _open_ring(virtual)
        earlier, text = on_every_rank(ring, take_up)
        continued = ring.gather(text.encode(), "slackring.lab.resume")[0].decode()
        config, folder, checkpoints = on_every_rank(ring, configure)
        ranks = ring.size
        if virtual:
            ranks = workers if workers is not None else earlier.ranks if earlier is not None else _WORKERS
        _tell_of_others(earlier, ranks)
        with ProgressBar(config, shown=None if ring.rank == 0 and not as_json else False) as bar:
            run = (
                train_virtual(config, ranks, interrupt=interrupt, bar=bar, checkpoints=checkpoints, earlier=earlier)
                if virtual
                else train_rank(
                    config,
                    ring=inject(ring, config),
                    interrupt=interrupt,
                    bar=bar,
                    checkpoints=checkpoints,
                    earlier=earlier,
                )
            )
        if run is not None:
            _finish(run, folder, as_json)
    if interrupt.signal == signal.SIGINT:
        sys.exit(128 + signal.SIGINT)  # other signals are a scheduler's, to which this run ended well


@cli.command()
@click.option("--rule", help="Synchronisation rule, e.g. bsp, or losp:k_max=16,compensation=0.5.")
@_one_run
@_on_cluster
@click.option(
    "--workers",
    type=click.IntRange(1),
    help=f"Number of ranks; else the resumed run's, the file's, all workers at the address, or {_WORKERS}.",
)
@_training
def run(
    rule: str | None,
    lr: float | None,
    resume: Path | None,
    checkpoint_every: float | None,
    cluster: str,
    wait: float,
    workers: int | None,
    out: Path,
    as_json: bool,
    **values: Any,
) -> None:
    """Train one model under one rule on a Dask cluster, which starts one rank a worker.

    The cluster is one that a YAML file describes (see cluster_configs/), which is started and ended with the run, or one that
    runs already, at its scheduler's address. Ctrl-C ends the run on all ranks after the same round, with all results; a second
    Ctrl-C ends it at once. The run's folder is like that of `slackring train`, with the logs of the ranks in ranks/. Both
    commands can --resume it, or a checkpoint of --checkpoint-every: these are written here, and stay if a rank or its worker
    dies.

    \b
    Examples:
      slackring run --rule losp --straggler persistent:ranks=3,factor=4 --step-time 0.1
      slackring run --cluster cluster_configs/ssh.yaml --rule losp --task my_package.tasks:cats
      slackring run --cluster tcp://10.0.0.1:8786 --rule bsp --seconds 60 --json
      slackring run --cluster cluster_configs/slurm.yaml --resume runs/20261129-211929-losp-seed0-2bba-round4000
    """
    _check_resumption(rule, resume)

    from rich.console import Console

    from slackring.lab.checkpoint import Checkpoints, RunFolder
    from slackring.lab.config import TrainConfig
    from slackring.lab.interrupt import Interrupt
    from slackring.lab.on_dask import check_cluster, dask_ranks, keep_logs, train_on_dask
    from slackring.lab.runs import check_writable
    from slackring.ring.ambient import launcher

    if resume is not None:
        earlier, config = _take_up(resume, False, values)
    else:
        earlier, config = None, TrainConfig(rule=rule or "", lr=lr, **_filled(values, virtual=False))
    if launcher() is not None:
        raise SpecError(f"run starts its own ranks; run it without {launcher()}, with --workers.")
    check_cluster(cluster)
    check_writable(out)
    folder = RunFolder(out, _new_run(config))
    checkpoints = Checkpoints(checkpoint_every, folder.keep)
    console = None if as_json else Console(stderr=True)
    ranks = workers or (earlier.ranks if earlier is not None else None if cluster else _WORKERS)
    with dask_ranks(cluster, ranks, [config.task], out, wait) as executor, Interrupt() as interrupt:
        _tell_of_others(earlier, executor.size)
        try:
            trained, logs = train_on_dask(
                executor,
                config,
                interrupt,
                cluster=cluster,
                checkpoints=checkpoints,
                earlier=earlier,
                console=console,
            )
        except BaseException:
            if folder.latest is not None:
                click.echo(f"slackring: the run can go on from its last checkpoint: --resume {folder.latest}", err=True)
            raise
        _finish(trained, folder, as_json)
        keep_logs(logs, folder.path)
    if interrupt.signal == signal.SIGINT:
        sys.exit(128 + signal.SIGINT)


@cli.command()
@click.option("--rules", default="bsp,local_sgd,osp,losp", show_default=True, help="Rules, joined by commas.")
@click.option(
    "--lr-grid",
    callback=_numbers(float),
    default="0.05,0.1,0.2,0.4,0.8",
    show_default=True,
    help="Rates to tune on.",
)
@click.option("--seeds", callback=_numbers(int), default="0", show_default=True, help="Seeds of the runs that count.")
@_on_cluster
@_ranks
@_training
def compare(
    rules: str,
    lr_grid: tuple[float, ...],
    seeds: tuple[int, ...],
    cluster: str,
    wait: float,
    out: Path,
    as_json: bool,
    virtual: bool,
    workers: int | None,
    **values: Any,
) -> None:
    """Compare rules fairly: each at its own learning rate, tuned on virtual ranks, then run on real ones with other seeds.

    Real ranks are started by horovodrun on this machine, or on a Dask cluster. Each sleeps in a step until --step-time is over,
    so that the runs that count are like the virtual ones. To compare on ranks that are uneven by themselves, give a --step-time
    below that of the fastest one, and --samples beside --seconds.

    On virtual ranks, server/bsp, server/asp, server/ssp, server/dssp and server/elastic_bsp run on a parameter server, as in
    their papers.

    \b
    Examples:
      slackring compare --rules bsp,local_sgd,osp,losp --workers 4 --straggler persistent:ranks=3,factor=4 --step-time 0.1
      slackring compare --rules bsp,losp:compensation=auto --seeds 0,1,2 --virtual --json
      slackring compare --rules bsp,losp,server/asp,server/dssp:lower=3,upper=15 --virtual
      slackring compare --rules bsp,losp --workers 8 --cluster cluster_configs/slurm.yaml
    """
    from rich.console import Console

    from slackring.lab.choices import parse_choices
    from slackring.lab.compare import compare as compare_rules
    from slackring.lab.comparison import CompareConfig
    from slackring.lab.config import TrainConfig
    from slackring.lab.interrupt import Interrupt
    from slackring.lab.launch import launcher as launch_on
    from slackring.lab.report import print_comparison
    from slackring.ring.ambient import launcher

    texts = tuple(map(str, parse_choices(rules)))
    # Tuning needs a step time, and the runs that count are to be like it.
    base = TrainConfig(**_filled(values, virtual=True))
    if virtual and cluster:
        raise SpecError("virtual ranks need no cluster: leave --virtual or --cluster out.")
    if cluster and workers is None:
        from slackring.lab.on_dask import workers_of

        workers = workers_of(cluster)
    config = CompareConfig(base, texts, _WORKERS if workers is None else workers, lr_grid, seeds, virtual=virtual)
    if launcher() is not None:
        raise SpecError(f"compare starts its own ranks; run it without {launcher()}, with --workers.")
    launch = launch_on("dask", cluster, wait) if cluster else launch_on("horovod")
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with Interrupt() as interrupt:
        comparison = compare_rules(config, out, launch=launch, interrupt=interrupt, say=errors.print)
    if as_json:
        click.echo(json.dumps(comparison.to_json(), indent=1))
    else:
        print_comparison(comparison, _console())
    if interrupt.signal is not None:
        sys.exit(128 + interrupt.signal)


@cli.command()
@click.option("--rule", "rules", required=True, help="The rule, or several joined by commas, which take turns.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the first interleaving; the next ones count on."
)
@click.option("--count", type=click.IntRange(1), default=1000, show_default=True, help="Interleavings to play.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def fuzz(rules: str, seed: int, count: int, as_json: bool) -> None:
    """Play random interleavings of step times, leaves, overflows, drains and stops on virtual ranks, against the promises.

    The first that breaks one ends it with exit code 1 and the command that plays it again.

    \b
    Example:
      slackring fuzz --rule bsp,losp --seed 7
    """
    import logging

    from tqdm import tqdm

    from slackring.rules.text import parse_rules
    from slackring.testing import PromiseBroken
    from slackring.testing.fuzz import fuzz as play

    parsed = parse_rules(rules)
    logging.getLogger("slackring").setLevel(logging.ERROR)  # overflows are part of the game
    broken: str | None = None
    with tqdm(total=count, unit="interleaving", disable=None, mininterval=0.5) as bar:
        try:
            play(parsed, seed, count, lambda done: bar.update())
        except PromiseBroken as exc:
            broken = str(exc)
    names = [str(rule) for rule in parsed]
    if as_json:
        click.echo(json.dumps({"rules": names, "seed": seed, "count": count, "broken": broken}, indent=1))
    elif broken is None:
        click.echo(f"{count} interleavings of {', '.join(names)} from seed {seed}: no promise broken.")
    else:
        click.echo(f"slackring: broken promise: {broken}", err=True)
    sys.exit(int(broken is not None))


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def show(folder: Path, as_json: bool) -> None:
    """Show a run or a comparison again.

    \b
    Example:
      slackring show runs/20261129-211929-compare-2bba
    """
    from slackring.lab.comparison import load_comparison
    from slackring.lab.report import print_comparison, print_run
    from slackring.lab.runs import load_run

    if (folder / "comparison.json").exists():
        comparison = load_comparison(folder)
        if as_json:
            click.echo(json.dumps(comparison.to_json(), indent=1))
        else:
            print_comparison(comparison, _console())
    else:
        run = load_run(folder)
        if as_json:
            click.echo(json.dumps(_run_as_json(run, folder), indent=1))
        else:
            print_run(run, str(folder), _console())


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--lookahead", type=click.IntRange(1), default=15, show_default=True, help="Iterations of each worker.")
@click.option(
    "--times", type=click.Choice(["ends", "iterations"]), help="What the file says; ends ascend, if not given."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the timeline into this file, e.g. plan.png.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def plan(file: Path, lookahead: int, times: Times | None, plot: Path | None, as_json: bool) -> None:
    """Plan where workers of unequal speed meet next, so that nobody waits long (ZipLine).

    FILE is a CSV with a line a worker, or JSON (a list of lists, or an object of lists by worker): when the worker's next
    iterations end, or how long its past ones took, in any unit. Past ones go on as the last; then all start at 0.

    \b
    Example:
      slackring plan times.csv --lookahead 15 --plot plan.png
    """
    from slackring.lab.supersteps import plan_superstep, print_superstep, read_recorded

    superstep = plan_superstep(read_recorded(file), lookahead, times)
    if plot is not None:
        try:
            from slackring.lab.plots import superstep_plot

            superstep_plot(superstep).savefig(plot)
        except ImportError as exc:
            raise SpecError(f"--plot needs the package {exc.name}: pip install 'slackring[lab]'.") from None
        except (OSError, ValueError) as exc:  # ValueError: no such kind of picture
            raise SpecError(f"--plot {str(plot)!r} cannot be written: {exc}.") from None
    if as_json:
        click.echo(json.dumps(superstep.to_json(), indent=1))
    else:
        print_superstep(superstep, _console())


@cli.command()
@click.option("--notebook", type=click.Path(path_type=Path), default="notebooks/quickstart.ipynb", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default="runs/demo", show_default=True, help="Where results go."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def demo(notebook: Path, out: Path, as_json: bool) -> None:
    """Run the quickstart notebook: compare rules on real ranks; leave a page and print the table.

    \b
    Example:
      slackring demo --out runs/demo
    """
    from slackring.lab.comparison import load_comparison
    from slackring.lab.notebooks import run_notebook
    from slackring.lab.report import print_comparison

    before = set(out.glob("*/comparison.json"))
    page = run_notebook(notebook, out, {"out": str(out.resolve())})
    comparisons = [load_comparison(file.parent) for file in sorted(set(out.glob("*/comparison.json")) - before)]
    if as_json:
        found = [comparison.to_json() for comparison in comparisons]
        click.echo(json.dumps({"page": str(page), "comparisons": found}, indent=1))
        return
    for comparison in comparisons:
        print_comparison(comparison, _console())
    click.echo(f"The page is {page}")


@cli.group()
def notebooks() -> None:
    """List the notebooks of a clone of the repository, and run them by papermill.

    \b
    Examples:
      slackring notebooks list
      slackring notebooks run losp -p size=laptop -p backend=virtual --out runs/losp
    """


_folder = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default="notebooks",
    show_default=True,
    help="Where the notebooks are.",
)


@notebooks.command("list")
@_folder
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def list_notebooks(folder: Path, as_json: bool) -> None:
    """List notebooks, and the parameters of each.

    \b
    Example:
      slackring notebooks list
    """
    from slackring.lab.notebooks import find_notebooks, parameters_of, title_of

    found = [(notebook, title_of(notebook), parameters_of(notebook)) for notebook in find_notebooks(folder)]
    if as_json:
        listed = [
            {
                "name": notebook.stem,
                "title": title,
                "parameters": {name: parameter._asdict() for name, parameter in parameters.items()},
            }
            for notebook, title, parameters in found
        ]
        click.echo(json.dumps({"notebooks": listed}, indent=1))
        return
    for notebook, title, parameters in found:
        click.echo(f"{notebook.stem}: {title}")
        for name, parameter in parameters.items():
            click.echo(f"    {name}={parameter.default}  {parameter.explanation}")


@notebooks.command("run")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "-p", "--parameter", "settings", multiple=True, metavar="KEY=VALUE", help="Of every notebook that is named."
)
@_folder
@click.option(
    "--out", type=click.Path(path_type=Path), default="runs/notebooks", show_default=True, help="Where results go."
)
@click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Notebooks that run at the same time."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def run_notebooks(
    names: tuple[str, ...], settings: tuple[str, ...], folder: Path, out: Path, jobs: int, as_json: bool
) -> None:
    """Run notebooks from their first cell to their last; each leaves itself, executed, and a page without its code.

    One that fails does not keep the others from running; the exit code is 2 then.

    \b
    Examples:
      slackring notebooks run losp -p size=laptop --out runs/losp
      slackring notebooks run elastic_bsp anytime_minibatch losp -p size=smoke -p backend=virtual --jobs 2
    """
    from slackring.lab import notebooks as lab

    texts: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key in texts:
            raise SpecError(
                f"-p {setting!r}: {'this parameter is given twice' if equals else 'it is of the form KEY=VALUE'}."
            )
        texts[key] = value
    found = lab.find_notebooks(folder, names)
    values = {notebook: lab.read_values(notebook, texts) for notebook in found}
    for notebook in found:
        if "out" in lab.parameters_of(notebook):
            values[notebook].setdefault("out", str(out.resolve()))
    pages: dict[str, str] = {}
    failed: dict[str, str] = {}
    for notebook, result in lab.run_notebooks(values, out, jobs):
        if isinstance(result, SlackringError):
            failed[notebook.stem] = str(result)
            click.echo(f"slackring: error: {result}", err=True)
        else:
            pages[notebook.stem] = str(result)
            click.echo(f"The page is {result}", err=as_json)
    if as_json:
        click.echo(json.dumps({"pages": pages, "failed": failed}, indent=1))
    sys.exit(2 if failed else 0)


_LIMITS = ("seconds", "samples", "rounds")
_BESIDE_RESUME = {"resume", "checkpoint_every", "workers", "virtual", "cluster", "wait", *_LIMITS, "out", "as_json"}


def _check_resumption(rule: str | None, resume: Path | None) -> None:
    """Have either a rule, or a run to continue, whose settings stay as they are."""
    if resume is None:
        if rule is None:
            raise click.UsageError("Missing option '--rule'.")
        return
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if given and parameter.name not in _BESIDE_RESUME:
            raise SpecError(f"{parameter.opts[0]} comes from the run that --resume continues; leave it out.")


def _take_up(resume: Path, virtual: bool, values: dict[str, Any]) -> tuple[Earlier, TrainConfig]:
    """Read a run to continue, and what it is from now on."""
    from slackring.lab.checkpoint import load_earlier

    earlier = load_earlier(resume)
    if virtual != (earlier.run.facts["ring"] == "virtual"):
        otherwise = "leave --virtual out" if virtual else "go on with 'slackring train --virtual'"
        raise SpecError(f"run {str(resume)!r} is of {earlier.ranks} {earlier.run.facts['ring']} ranks; {otherwise}.")
    return earlier, earlier.going_on({name: values[name] for name in _LIMITS})


def _tell_of_others(earlier: Earlier | None, ranks: int) -> None:
    """Say on how many ranks a run goes on, if these are not those it had."""
    told = None if earlier is None else earlier.on_others(ranks)
    if told is not None:
        click.echo(f"slackring: {told}", err=True)


def _filled(values: dict[str, Any], virtual: bool) -> dict[str, Any]:
    """Fill in what depends on other options."""
    if values["step_time"] is None and virtual:
        values["step_time"] = 0.1
    if values["seconds"] is None and values["samples"] is None and values["rounds"] is None:
        values["seconds"] = _LIMIT
    return values


def _new_run(config: TrainConfig) -> str:
    """Make up the name of a run's folder."""
    from slackring.naming import new_name

    return new_name(config.parsed_rule().name.replace("/", "-"), f"seed{config.seed}")


def _finish(run: Run, folder: RunFolder, as_json: bool) -> None:
    """Write a run, and say what came out also where it cannot be written."""
    from slackring.lab.report import print_run

    unwritten: OutputError | None = None
    try:
        folder.finish(run)
    except OutputError as exc:
        unwritten = exc
    if as_json:
        click.echo(json.dumps(_run_as_json(run, folder.path), indent=1))
    else:
        print_run(run, str(folder.path), _console())
    if unwritten is not None:
        raise unwritten


def _run_as_json(run: Run, folder: Path) -> dict[str, Any]:
    return {"run": str(folder), **run.facts, **run.config.to_json(), **run.summary.to_json()}


def _console() -> Console:
    from rich.console import Console

    # A pipe has no width; the table should not be folded for one.
    return Console(width=None if sys.stdout.isatty() else 180)


def _open_ring(virtual: bool) -> Ring:
    """Open the ring of this process."""
    from slackring.ring.ambient import launcher, ring

    if launcher() is not None and virtual:
        raise SpecError(f"virtual ranks all live in one process; run --virtual without {launcher()}, with --workers.")
    if launcher() == "horovodrun":
        import torch

        from slackring.ring.horovod import import_horovod

        hvd = import_horovod()
        hvd.init()
        if "OMP_NUM_THREADS" not in os.environ:
            # Ranks of one machine share its cores.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    elif launcher() == "torchrun":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    return ring()


def main() -> None:
    """Run the command line; the entry point of ``slackring``.

    A mistake of the user is one line on stderr and exit code 2. All ranks notice the same mistakes, so rank 0 tells them.
    """
    try:
        cli.main(sys.argv[1:] or ["--help"], standalone_mode=False)
    except click.exceptions.Abort:  # what click makes of a KeyboardInterrupt
        click.echo("slackring: interrupted before there was a result.", err=True)
        sys.exit(130)
    except click.ClickException as exc:
        _complain(exc.format_message())
    except SlackringError as exc:
        _complain(str(exc), everywhere=isinstance(exc, RingError))


def _complain(message: str, *, everywhere: bool = False) -> None:
    rank = os.environ.get("HOROVOD_RANK") or os.environ.get("RANK", "0")
    if rank == "0" or everywhere:
        where = f" rank {rank}:" if rank != "0" else ""
        click.echo(f"slackring: error:{where} {message}", err=True)
    else:
        time.sleep(_HEAD_START)
    sys.exit(2)
