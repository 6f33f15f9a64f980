"""`kvproxy plan`: what it reads, prints and writes (options.py has its options)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TextIO

from kvproxy.base.errors import KvproxyError
from kvproxy.base.settings.model import parse_size_bytes
from kvproxy.lab.planner.layers import DTYPE_BYTES, KvLayers, PlanError, read_layers
from kvproxy.lab.planner.memory import SEQUENCE_TOKENS, Engine, Tier, count_tiers
from kvproxy.lab.planner.models import Model, find_model, known_models
from kvproxy.lab.planner.report import PlanReport
from kvproxy.lab.planner.traffic import TrafficPlan, Wanted, play_sizes
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.settings import ENGINES, TierPlan
from kvproxy.lab.replay.trace import Trace, read_trace
from kvproxy.operate.config.decode import spelling_hint

#: Precisions in which KV can be kept.
_KV_DTYPES = sorted(name for name, size in DTYPE_BYTES.items() if size >= 1)

_SUFFIXES: Mapping[str, float] = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def main(args: argparse.Namespace) -> int:
    """`kvproxy plan`."""
    return run(args, out=sys.stdout, err=sys.stderr)


def run(args: argparse.Namespace, *, out: TextIO, err: TextIO) -> int:
    """Run the command; its exit status."""
    if args.model == "list":
        print("\n".join(_list_models()), file=out)
        return 0
    try:
        report = _plan(args, err)
    except (KvproxyError, ValueError) as error:
        print(f"kvproxy plan: {error}", file=err)
        return 1
    print(report.render_text(), file=out)
    if args.json:
        args.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    if args.plot:
        args.plot.write_text(report.render_html())
    return 0


def _list_models() -> list[str]:
    width = max(map(len, known_models()))
    return [f"{name:{width}}  {_describe_size(read_layers(model.config))}" for name, model in known_models().items()]


def _describe_size(layers: KvLayers) -> str:
    """Layers with a window keep no more for a longer prompt."""
    per_token = layers.bytes_per_token("bf16") / 1024
    return (
        f"{per_token:7.1f} KiB a token in bf16" if per_token else f"{'windowed':>11}: no more than its window in bf16"
    )


def _plan(args: argparse.Namespace, err: TextIO) -> PlanReport:
    if args.plot and (args.plot.suffix.casefold() not in (".html", ".htm") or not args.trace):
        raise PlanError("--plot FILE.html needs a --trace")
    wanted = Wanted(args.want_hit, args.want_ttft) if args.want_hit is not None or args.want_ttft is not None else None
    if wanted is not None and not args.trace:
        raise PlanError("--want-hit and --want-ttft need a --trace: how often a prefix comes again is in the traffic")
    model = find_model(args.model)
    layers = read_layers(model.config)
    trace = _read_trace(args) if args.trace else None
    engine = _engine(args, model, layers, trace)
    tiers = count_tiers(engine, layers)
    if trace is None:
        return PlanReport(model, layers, engine, tiers)
    traffic = _traffic(args, trace, tiers)
    return PlanReport(model, layers, engine, tiers, traffic, play_sizes(traffic, err=err), wanted)


def _read_trace(args: argparse.Namespace) -> Trace:
    trace = read_trace(args.trace)
    return trace.cut(args.requests) if args.requests else trace


def _engine(args: argparse.Namespace, model: Model, layers: KvLayers, trace: Trace | None) -> Engine:
    if args.tp < 1 or not 0 < args.utilization <= 1 or args.block_size < 1 or (args.context or 1) < 1:
        raise PlanError("--tp, --block-size and --context are at least 1, --utilization is above 0 and at most 1")
    if not layers.groups:
        raise PlanError(f"{args.model}: no layer of it keeps KV")
    return Engine(
        gpu_bytes=_size("--gpu", args.gpu),
        weights_bytes=_weights(args, model),
        gpus=args.tp,
        dtype=_kv_dtype(args.dtype, model),
        utilization=args.utilization,
        overhead_bytes=_size("--overhead", args.overhead),
        host_bytes=_size("--host", args.host),
        disk_bytes=_size("--disk", args.disk),
        block_tokens=args.block_size,
        sequence_tokens=args.context or (_usual_tokens(trace) if trace is not None else SEQUENCE_TOKENS),
    )


def _kv_dtype(text: str, model: Model) -> str:
    """`auto` is the model's own precision; where its weights are smaller than KV can be, what vLLM computes in."""
    if text == "auto":
        return model.dtype if DTYPE_BYTES[model.dtype] >= 2 else "bf16"
    if text not in _KV_DTYPES:
        raise PlanError(f"--dtype {text}: KV is not kept so ({spelling_hint(text, ['auto', *_KV_DTYPES])})")
    return text


def _weights(args: argparse.Namespace, model: Model) -> float:
    if args.weights:
        return _size("--weights", args.weights)
    if args.weights_dtype and args.weights_dtype not in DTYPE_BYTES:
        raise PlanError(f"--weights-dtype {args.weights_dtype} ({spelling_hint(args.weights_dtype, DTYPE_BYTES)})")
    if args.parameters:
        model = replace(model, parameters=_parameters(args.parameters), checkpoint_bytes=0)
    if size := model.weights_bytes(args.weights_dtype):
        return size
    raise PlanError(
        f"how large the weights of {args.model} are is not in a config.json: add --parameters 8B or --weights 16GB (or "
        "keep the model's model.safetensors.index.json beside it)"
    )


def _parameters(text: str) -> float:
    try:
        number = float(text[:-1]) * _SUFFIXES[text[-1].upper()] if text[-1].upper() in _SUFFIXES else float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise PlanError(f"--parameters takes a number such as 8B or 70.6B, not {text!r}")
    return number


def _size(option: str, text: str) -> int:
    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise PlanError(f"{option}: {error}") from None


def _usual_tokens(trace: Trace) -> int:
    """Return a request of the trace, with its answer, on average."""
    lengths = [turn.prompt_tokens + turn.output_tokens for session in trace.sessions for turn in session.turns]
    return sum(lengths) // len(lengths)


def _traffic(args: argparse.Namespace, trace: Trace, tiers: Sequence[Tier]) -> TrafficPlan:
    try:
        shares = tuple(float(each) for each in args.sizes.split(","))
    except ValueError:
        shares = ()
    if not shares or min(shares) <= 0 or args.instances < 1 or args.load <= 0:
        raise PlanError("--sizes takes shares such as 0.5,1,2; --instances is at least 1 and --load above 0")
    if min(args.host_gbps, args.disk_gbps) <= 0:
        raise PlanError("--host-gbps and --disk-gbps are above 0")
    fleet = replace(ENGINES[args.engine], instances=args.instances, capacity_tokens=tiers[0].tokens)
    if args.prefill_tokens_per_s is not None:
        fleet = replace(fleet, timing=replace(fleet.timing, prefill_tokens_per_s=args.prefill_tokens_per_s))
    tokens = {tier.name: tier.tokens for tier in tiers[1:]}
    token_bytes = round(tiers[-1].bytes_per_token)  # the same in host memory and on disk
    below = TierPlan(gb_per_s=args.host_gbps, disk_gb_per_s=args.disk_gbps, kv_bytes_per_token=token_bytes)
    return TrafficPlan(
        trace,
        fleet,
        PolicySpec.parse(args.policy),
        args.load,
        shares,
        tokens.get("host", 0),
        tokens.get("disk", 0),
        below,
    )
