"""`tilewright scaling`: plan training runs, fit a scaling law to their losses, predict the next run."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.root import app, ends_on_sigterm, plain_errors, say

if TYPE_CHECKING:
    from tilewright.scaling.plan import Plan

__all__ = ["scaling"]

scaling = typer.Typer(
    help="Scaling laws: plan training runs, fit a law to their losses, predict the best model size for a budget.",
    no_args_is_help=True,
    epilog="[b]Examples[/b]\n\n"
    "tilewright scaling plan --budget 3e19 --card h200 --out plan.json\n\n"
    "tilewright scaling fit runs.csv --out law.json --plots plots\n\n"
    "tilewright scaling predict law.json --flops 1e24",
)
app.add_typer(scaling, name="scaling")

_Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@scaling.command()
def plan(
    context: typer.Context,
    budget: Annotated[float, typer.Option(help="largest budget, in FLOPs of one run")],
    budgets: Annotated[int, typer.Option(help="number of budgets, including the largest")] = 5,
    ratio: Annotated[float, typer.Option(help="factor between one budget and the next")] = 10**0.5,
    sizes: Annotated[int, typer.Option(help="number of model sizes for each budget")] = 5,
    span: Annotated[
        float, typer.Option(help="sizes range from the expected best size / this factor to that size * it; 1.2 to 100")
    ] = 3.0,
    vocab: Annotated[int, typer.Option(help="size of the vocabulary")] = 32_000,
    sequence: Annotated[
        int, typer.Option(help="length of a training sequence in tokens; attention's FLOPs depend on it")
    ] = 1024,
    tied: Annotated[bool, typer.Option("--tied", help="embedding and output layer share one matrix")] = False,
    head_dim: Annotated[int, typer.Option(help="size of an attention head; hidden sizes are multiples of it")] = 64,
    layers: Annotated[
        int | None, typer.Option(help="number of layers of every model; default: chosen from the hidden size")
    ] = None,
    hidden: Annotated[
        str | None,
        typer.Option(
            help="hidden sizes to try, as in 64,96,128, with --layers; with --prior, only those within --span of the best size"
        ),
    ] = None,
    max_tokens: Annotated[
        float, typer.Option(help="with --hidden: leave out runs that read more tokens, such as those of one epoch")
    ] = math.inf,
    lr: Annotated[
        str | None,
        typer.Option(
            help="learning rates: each run once with each, as in 2e-3,4e-3; or one for each hidden size, as in "
            "128:4e-3,512:1e-3, interpolated between them; default: that of the training config"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="make each run with this many seeds")] = 1,
    prior: Annotated[
        Path | None, typer.Option(help="law.json of an earlier fit, to estimate the best sizes; default: the Chinchilla law")
    ] = None,
    card: Annotated[str, typer.Option(help="GPU for which the hours are estimated")] = "h200",
    utilisation: Annotated[float, typer.Option(help="share of the GPU's peak speed that training is assumed to reach")] = 0.35,
    out: Annotated[Path | None, typer.Option(help="write the plan to this file")] = None,
    as_json: _Json = False,
) -> None:
    """Plan runs of several model sizes at several budgets, so that the best size of each budget lies within the range."""
    with plain_errors(context):
        from tilewright.scaling.plan import hours, rates, repeated

        shapes = {"vocab": vocab, "sequence": sequence, "tied": tied, "head_dim": head_dim, "layers": layers}
        grid = {"budgets": budgets, "ratio": ratio, "span": span}
        made = _planned(budget, hidden, prior, sizes, max_tokens, shapes | grid)
        made = repeated(made, None if lr is None else rates(lr), seeds)
        needed = [hours(run.flops, card, utilisation) for run in made.runs]
        if out is not None:
            out.write_text(json.dumps(made.to_json(), indent=1) + "\n", encoding="utf-8")
            say(f"Saved to {out}")
        if as_json:
            print(json.dumps(made.to_json() | {"hours": needed, "card": card, "utilisation": utilisation}))
        else:
            _print_plan(made, needed, f"{card.upper()} at {utilisation:.0%} of its peak")


def _planned(
    budget: float, hidden: str | None, prior: Path | None, sizes: int, max_tokens: float, others: dict[str, Any]
) -> "Plan":  # fmt: skip
    from tilewright.scaling.analysis import read_analysis
    from tilewright.scaling.budget_law import BudgetLaw
    from tilewright.scaling.law import Law
    from tilewright.scaling.plan import PRIOR, plan, plan_widths

    saved = None if prior is None else read_analysis(prior)
    if hidden is None:
        if max_tokens < math.inf:
            raise ValueError("--max-tokens needs --hidden; give the hidden sizes to try")
        return plan(budget, sizes=sizes, prior=PRIOR if saved is None else Law(**saved["law"]), **others)
    if others["layers"] is None:
        raise ValueError("--hidden needs --layers, because all sizes have the same number of layers")
    try:
        widths = [int(width) for width in hidden.split(",")]
    except ValueError:
        raise ValueError(f"--hidden is {hidden!r}, wanted hidden sizes, as in 64,96,128") from None
    if saved is None:
        law = None
    else:
        law = BudgetLaw.from_json(saved["budget_law"]) if saved.get("budget_law") else Law(**saved["law"])
    return plan_widths(budget, widths, prior=law, max_tokens=max_tokens, **others)


def _print_plan(made: "Plan", needed: list[float], machine: str) -> None:
    print(f"{'name':20} {'layers':>6} {'hidden':>6} {'params':>9} {'tokens':>9} {'tokens/param':>12} {'hours':>9}")
    for run, time in zip(made.runs, needed):
        shape, ratio = run.shape, run.tokens / run.params
        sizes = f"{shape.layers:6} {shape.hidden:6} {run.params:9.3g} {run.tokens:9.3g} {ratio:12.1f} {time:9.3g}"
        print(f"{run.name:20} {sizes}")
    total = sum(run.flops for run in made.runs)
    print(f"{len(made.runs)} runs, {total:.3g} FLOPs in all, {sum(needed):.3g} hours on one {machine}")


@scaling.command()
def run(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(help="plan file, written by `plan --out`")],
    config: Annotated[
        Path,
        typer.Argument(help="TOML config of `tilewright train` with data, tokenizer, eval_data, batch size and learning rate"),
    ],
    out: Annotated[Path, typer.Option(help="folder for the runs; their losses are written to runs.csv in it")] = Path("series"),
    jobs: Annotated[int, typer.Option(help="number of runs at a time; several small models can share one GPU")] = 1,
) -> None:
    """Train all models of a plan with `tilewright train` and write one row of runs.csv for each.

    If it is interrupted, the same command continues it.
    """
    with plain_errors(context):
        from tilewright.scaling.plan import read_plan
        from tilewright.scaling.run import run_plan
        from tilewright.scaling.trainer import command_of, held_out_loss, shared_data

        made = read_plan(plan)
        command_of(config, made)  # refuses what cannot be trained before anything is made
        data = shared_data(config, made, out / "data", say)
        table = run_plan(made, out, command_of(config, made, data), held_out_loss, say, jobs)
        print(table)
        say(f"All runs are done; fit them: tilewright scaling fit {table}")


@scaling.command()
def fit(
    context: typer.Context,
    data: Annotated[
        Path, typer.Argument(help="CSV file with one run on each line: its loss, and two of parameters, tokens and FLOPs")
    ],
    params_column: Annotated[str | None, typer.Option(help="column of the parameter count; default: found by its name")] = None,
    tokens_column: Annotated[str | None, typer.Option(help="column of the training tokens; default: found by its name")] = None,
    flops_column: Annotated[str | None, typer.Option(help="column of the FLOPs; default: found by its name")] = None,
    loss_column: Annotated[
        str | None, typer.Option(help="column of the loss in nats per token; default: found by name")
    ] = None,
    drop_highest: Annotated[int, typer.Option(help="leave out this many runs, those with the highest losses")] = 0,
    delta: Annotated[float, typer.Option(help="threshold of the Huber loss on log L, above which it is linear")] = 1e-3,
    bootstrap: Annotated[
        int, typer.Option(help="number of bootstrap fits from which the confidence intervals are computed")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="seed of the bootstrap")] = 0,
    test: Annotated[
        str | None, typer.Option(help="law to test against the runs: E,A,B,alpha,beta or hoffmann (Chinchilla paper)")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="write the fitted law to this file, for `predict` and `plan --prior`")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="write SVG plots into this folder")] = None,
    as_json: _Json = False,
) -> None:
    """Fit L = E + A/N^alpha + B/D^beta to runs, with 95 % intervals.

    L: loss, N: parameters, D: training tokens. Two other methods are shown for comparison; doubtful fits print a warning.
    """
    with plain_errors(context), ends_on_sigterm():
        from tilewright.scaling.analysis import analyse
        from tilewright.scaling.fit import rejection
        from tilewright.scaling.runs import Columns, read_runs

        tested = None if test is None else _law(test)
        names = Columns(params=params_column, tokens=tokens_column, flops=flops_column, loss=loss_column)
        runs = read_runs(data, names).without_highest(drop_highest)
        say(f"Fitting {len(runs)} runs ...")
        with _extra():
            found = analyse(runs, delta=delta, bootstrap=bootstrap, seed=seed)
            saved: dict[str, Any] = found.to_json()
            if tested is not None:
                saved["test"] = asdict(rejection(runs, found.fit, tested))
            if plots is not None:
                from tilewright.scaling.charts import write_charts

                say(f"Plots: {', '.join(map(str, write_charts(found, plots)))}")
        if out is not None:
            out.write_text(json.dumps(saved) + "\n", encoding="utf-8")
            say(f"Saved to {out}; use it: tilewright scaling predict {out} --flops 1e24")
        if as_json:
            print(json.dumps({key: value for key, value in saved.items() if key not in ("samples", "names")}))
        else:
            _print_fit(saved)
        for warning in found.warnings:
            say(f"warning: {warning}")


def _law(text: str) -> Any:
    from tilewright.scaling.law import HOFFMANN, Law

    if text == "hoffmann":
        return HOFFMANN
    try:
        E, A, B, alpha, beta = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--test is {text!r}, wanted five numbers E,A,B,alpha,beta, or hoffmann") from None
    if not all(0 < value < 1e30 for value in (E, A, B, alpha, beta)):
        raise ValueError(f"--test is {text!r}, wanted numbers above 0")
    return Law(E=E, A=A, B=B, alpha=alpha, beta=beta)


@contextmanager
def _extra() -> Iterator[None]:
    """A missing package is one sentence for a user, like any other wrong input."""
    try:
        yield
    except ImportError as error:
        raise ValueError(str(error)) from error


def _print_fit(saved: dict[str, Any]) -> None:
    print(f"{saved['runs']} runs, Huber objective {saved['objective']:.7f} (delta {saved['delta']:g})")
    values = saved["law"] | {"exponent": saved["law"]["beta"] / (saved["law"]["alpha"] + saved["law"]["beta"])}
    for name, value in values.items():
        between = saved["intervals"][name]
        said = f"  95 %: {between[0]:.4g} to {between[1]:.4g}" if between else ""
        print(f"{name:>9} {value:10.4g}{said}" + ("  (N* ~ C^exponent, by the law)" if name == "exponent" else ""))
    for method, t in saved["trends"].items():
        said = (
            "no trend" if t is None else f"{t['exponent']:.4g}  95 %: {t['low']:.4g} to {t['high']:.4g}, {t['points']} points"
        )
        print(f"exponent by {method}: {said}")
    if line := saved["loss_trend"]:
        print(
            f"lowest loss by budget: {line['factor']:.4g} C^-{line['exponent']:.4g}, {line['budgets']} budgets; off "
            f"by {line['left_out']:+.2%} for the largest budget if that is left out"
        )
    if saved["budget_law"]:
        _print_other_laws(saved)
    if left := saved["leave_largest_out"]:
        print(
            f"without the {left['held_out']} largest runs, predicted over {left['decades']:.1f} decades: loss off by "
            f"{left['mean']:+.2%} on average, {left['rms']:.2%} RMS, {left['worst']:+.2%} at worst"
        )
    if test := saved.get("test"):
        rejected = "rejected" if test["p_value"] < 0.05 else "not rejected"
        print(
            f"the given law is {rejected}: likelihood ratio {test['statistic']:.1f}, the largest of {test['resamples']} "
            f"resamples under it {test['largest']:.1f}, p = {test['p_value']:.3g}"
        )


def _print_other_laws(saved: dict[str, Any]) -> None:
    if saved["repeats"]:
        count, scatter = saved["repeats"]
        print(f"{count} runs have repeats of the same size and tokens, which scatter by {scatter:.2%}")
    for name in ("budget", "joint"):
        law = saved[f"{name}_law"]
        floor = sum(E * weight for E, weight in zip(law["floors"], law["weights"]))
        print(f"{name} law: floor {floor:.4g} on average over its likelihood, a run scatters by {law['noise']:.2%}")
    if saved["backtests"]:
        print("the largest budget predicted from smaller ones (error of the loss, and half of the 95 % interval):")
        print(f"{'largest used':>14} {'times':>6} {'runs':>5} {'law':>8} {'line':>8} {'budget law':>16} {'joint law':>16}")
    for test in saved["backtests"]:
        line = f"{'':8}" if test["line"] is None else f"{test['line']:+8.2%}"
        used = f"{test['flops']:14.3g} {test['factor']:6.1f} {test['runs']:5}"
        budget = f"{test['budget_law']:+8.2%} ({test['reach']:.2%})"
        joint = f"{test['joint_law']:+8.2%} ({test['joint_reach']:.2%})"
        print(f"{used} {test['law']:+8.2%} {line} {budget:>16} {joint:>16}")


@scaling.command()
def predict(
    context: typer.Context,
    law: Annotated[Path, typer.Argument(help="law file, written by `fit --out`")],
    flops: Annotated[float | None, typer.Option(help="budget in FLOPs: predict its best model size, tokens and loss")] = None,
    plan: Annotated[Path | None, typer.Option(help="plan file: predict the loss of each of its runs instead")] = None,
    as_json: _Json = False,
) -> None:
    """Predict the best size, tokens and loss for a budget, or the loss of each run of a plan, with 95 % intervals."""
    with plain_errors(context):
        from tilewright.scaling.analysis import predict as predict_from
        from tilewright.scaling.analysis import read_analysis

        if plan is not None and flops is None:
            _predict_runs(read_analysis(law), plan, as_json)
            return
        if flops is None or plan is not None:
            raise ValueError("give either a budget with --flops or a plan with --plan")
        said = predict_from(read_analysis(law), flops)
        if as_json:
            print(json.dumps(asdict(said)))
            return
        for name, digits in (("params", 3), ("tokens", 3), ("loss", 4)):
            value, between = getattr(said, name), getattr(said, f"{name}_interval")
            said_between = f"  95 %: {between[0]:.{digits}g} to {between[1]:.{digits}g}" if between else ""
            print(f"{name:>7} {value:10.{digits}g}{said_between}")
        for name in ("budget", "joint"):
            loss, between = getattr(said, f"{name}_law_loss"), getattr(said, f"{name}_law_interval")
            if loss is not None and between is not None:
                size = getattr(said, f"{name}_law_params")
                interval = f"95 % for a run: {between[0]:.4g} to {between[1]:.4g}"
                print(f"By the {name} law: {loss:.4g} ({interval}) with {size:.3g} parameters")
        if said.frontier_loss is not None and said.frontier_left_out is not None:
            tried = f"off by {said.frontier_left_out:+.2%} for the largest budget when that was left out"
            print(f"By the lowest loss of each budget, as a power of it: {said.frontier_loss:.4g} ({tried})")
            low, high = said.loss_interval or (said.frontier_loss, said.frontier_loss)
            if not low <= said.frontier_loss <= high:
                print("The two differ by more than the law's interval, so the interval is too narrow")
        if said.decades > 0:
            print(f"extrapolates {said.decades:.1f} decades beyond the largest run")
        else:
            print("within the budgets of the runs")


def _predict_runs(saved: dict[str, Any], path: Path, as_json: bool) -> None:
    from tilewright.scaling.analysis import predict_loss
    from tilewright.scaling.budget_law import BudgetLaw
    from tilewright.scaling.joint_law import JointLaw
    from tilewright.scaling.plan import read_plan

    by_budget = BudgetLaw.from_json(saved["budget_law"]) if saved.get("budget_law") else None
    joint = JointLaw.from_json(saved["joint_law"]) if saved.get("joint_law") else None
    rows: list[dict[str, Any]] = []
    for run in read_plan(path).runs:
        loss, between = predict_loss(saved, run.params, run.tokens)
        row = {"name": run.name, "params": run.params, "tokens": run.tokens, "loss": loss, "loss_interval": between}
        if by_budget is not None:
            row["budget_law_loss"], row["budget_law_interval"] = by_budget.loss(run.flops, run.params)
        if joint is not None:
            row["joint_law_loss"], row["joint_law_interval"] = joint.loss(run.params, run.tokens)
        rows.append(row)
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        between = row["loss_interval"]
        said = f"  95 %: {between[0]:.4g} to {between[1]:.4g}" if between else ""
        print(f"{row['name']}: {row['params']:.3g} parameters, {row['tokens']:.3g} tokens, loss {row['loss']:.4g}{said}")
        for name in ("budget", "joint"):
            if f"{name}_law_loss" in row:
                low, high = row[f"{name}_law_interval"]
                print(f"  by the {name} law {row[f'{name}_law_loss']:.4g}  95 % for a run: {low:.4g} to {high:.4g}")
