"""``quire plan``: what a KV cache needs, before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli import terminal

if TYPE_CHECKING:
    from cluster.kv_arithmetic import KVShape

DEFAULT_TOKENS = 2048


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder or config.json, GGUF file, built-in name, or hub id; no weights needed."),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="A published shape: llama-7b, llama-2-70b, llama-3-8b ...")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers; with --heads and --head-dim in place of MODEL.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; unset: as many as query heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of a sequence; unset: the context, or 2048.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="KV type: float32, bfloat16, float16, fp8 or int8.")] = "float16",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block (a page).")] = 16,
    memory: Annotated[str | None, typer.Option(help="Memory for KV, of each rank: 24GiB, 80GB ...")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of a group (tensor parallelism).")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes in bytes.")] = False,
) -> None:
    """Reckon the KV cache of a model: bytes per token, blocks, what fits, with MHA, GQA and MQA side by side.

    [bold]Examples[/]

      quire plan --shape llama-7b --tokens 2048

      quire plan --layers 32 --heads 32 --head-dim 128 --tokens 2048 --dtype float16

      quire plan smollm2-135m --tokens 1024 --memory 4GiB --dtype float32

      quire plan ./Llama-3-70B --tp 8 --memory 40GiB --batch 64 --json
    """
    from cluster import kv_arithmetic as kv
    from cluster.errors import ConfigError

    if dtype not in kv.DTYPE_BYTES:
        raise ConfigError(f"--dtype: must be one of {', '.join(kv.DTYPE_BYTES)}; got {dtype!r}", field="dtype")
    found = _shape(model, shape, {"layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim})
    settings = {
        "dtype_bytes": kv.DTYPE_BYTES[dtype],
        "tokens": tokens or found.max_context or DEFAULT_TOKENS,
        "batch": batch,
        "block_tokens": block_tokens,
        "memory_bytes": None if memory is None else kv.parse_size(memory),
    }
    report = _report(found, tp, dtype, settings)
    if json:
        import json as json_module

        terminal.out.print(json_module.dumps(report, indent=2), markup=False)
    else:
        _print(found, report)


def _shape(model: str | None, shape: str | None, sizes: dict[str, int | None]) -> KVShape:
    """From exactly one of MODEL, --shape, or the sizes."""
    from cluster import kv_arithmetic as kv
    from cluster.errors import ConfigError

    given = {name: value for name, value in sizes.items() if value is not None}
    if sum((model is not None, shape is not None, bool(given))) != 1:
        raise ConfigError(
            "model: give one of MODEL, --shape NAME, or --layers, --heads and --head-dim (see quire plan --help)",
            field="model",
        )
    if shape is not None:
        if shape not in kv.SHAPES:
            raise ConfigError(f"--shape: must be one of {', '.join(kv.SHAPES)}; got {shape!r}", field="shape")
        return kv.SHAPES[shape]
    if model is not None:
        return kv.shape_of(model, _config(model))
    missing = [f"--{name.replace('_', '-')}" for name in ("layers", "heads", "head_dim") if name not in given]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: must be given too, for a model without files", field=missing[0])
    given.setdefault("kv_heads", given["heads"])
    return kv.KVShape(name=f"{given['layers']} layers", **given)


def _config(model: str) -> dict[str, Any]:
    """The config alone: of a hub model nothing else is downloaded."""
    from pathlib import Path

    from cluster import models
    from cluster.model_cache import BUILT_IN

    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return models.hf_config(models.ModelFiles(path.parent.name, path.parent, "hf"))
    is_hub_id = (
        model not in BUILT_IN and not path.exists() and model.count("/") == 1 and not model.startswith((".", "/"))
    )
    return _hub_config(model) if is_hub_id else models.hf_config(models.resolve(model))


def _hub_config(model: str) -> dict[str, Any]:
    from pathlib import Path

    import huggingface_hub

    from cluster import models
    from cluster.errors import ModelLoadError

    try:
        cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
        found = cached if isinstance(cached, str) else huggingface_hub.hf_hub_download(model, "config.json")
    except Exception as error:  # whatever the hub's HTTP, file and validation layers raise
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
        raise ModelLoadError(
            f"model: {model!r} is no folder or file here, and its config.json is not to be had from the hub ({reason})",
            field="model",
        ) from error
    return models.hf_config(models.ModelFiles(model, Path(found).parent, "hf"))


# -- what is said ------------------------------------------------------------------------------------------------------


def _report(shape: KVShape, tp: int, dtype: str, settings: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from cluster import kv_arithmetic as kv

    per_rank = [kv.reckon(shape, **settings, kv_heads=heads) for heads in kv.heads_per_rank(shape, tp)]
    blocks, sequences = kv.group_costs(per_rank)
    return {
        "model": asdict(shape) | {"attention": shape.kind},
        "dtype": dtype,
        **settings,
        "tp": tp,
        "whole": asdict(kv.reckon(shape, **settings)),
        "variants": [_variant(one, one.kv_heads == shape.kv_heads, tp, settings) for one in kv.variants(shape)],
        "ranks": [asdict(costs) for costs in per_rank],
        "group": {"memory_blocks": blocks, "memory_sequences": sequences},
    }


def _variant(shape: KVShape, this_model: bool, tp: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Sizes are of the whole model; what fits is what fits a group of ``tp`` ranks with this memory each."""
    from dataclasses import asdict

    from cluster import kv_arithmetic as kv

    blocks, sequences = kv.group_costs([kv.reckon(shape, **settings, kv_heads=n) for n in kv.heads_per_rank(shape, tp)])
    whole = asdict(kv.reckon(shape, **settings)) | {"memory_blocks": blocks, "memory_sequences": sequences}
    return {"attention": shape.kind, "this_model": this_model, **whole}


def _print(shape: KVShape, report: dict[str, Any]) -> None:
    from cluster.kv_arithmetic import Costs, format_size

    whole = Costs(**report["whole"])
    say = terminal.out.print
    tokens, batch = report["tokens"], report["batch"]
    say(
        f"{shape.name}: {shape.layers} layers, {shape.heads} query heads, {shape.kv_heads} KV heads of "
        f"{shape.head_dim} ({shape.kind}), {report['dtype']}",
        markup=False,
    )
    say(
        f"a token  2 · {shape.layers} layers · {shape.kv_heads} KV heads · {shape.head_dim} · {report['dtype_bytes']} "
        f"bytes = {whole.bytes_per_token:,} bytes ({format_size(whole.bytes_per_token)})",
        markup=False,
    )
    say(f"a block  {report['block_tokens']} tokens = {format_size(whole.bytes_per_block)}", markup=False)
    say(f"KV cache of {batch} × {tokens:,} tokens: {format_size(whole.batch_bytes)}", markup=False, end="")
    say(f" ({batch * whole.blocks_per_sequence:,} blocks, {format_size(whole.batch_block_bytes)})", markup=False)
    if shape.window is not None:
        say(
            f"note: a window of {shape.window:,} tokens is configured; every layer is counted as keeping all",
            markup=False,
        )
    say()
    say(_variants_table(report))
    if report["tp"] > 1:
        say()
        say(_ranks_table(report))
    if report["memory_bytes"] is not None:
        group = report["group"]
        say()
        say(
            f"{format_size(report['memory_bytes'])} on each of {report['tp']} ranks: {group['memory_blocks']:,} blocks"
            f", {group['memory_sequences']:,} sequences of {tokens:,} tokens",
            markup=False,
        )


def _variants_table(report: dict[str, Any]) -> Any:
    table = _table("attention", "KV heads", "a token", "a sequence", "the batch", *_memory_heading(report))
    for one in report["variants"]:
        mark = " (this model)" if one["this_model"] else ""
        table.add_row(one["attention"] + mark, *_cells(one, report))
    return table


def _ranks_table(report: dict[str, Any]) -> Any:
    table = _table("rank", "KV heads", "a token", "a sequence", "the batch", *_memory_heading(report))
    for rank, one in enumerate(report["ranks"]):
        table.add_row(str(rank), *_cells(one, report))
    copies = report["tp"] - report["model"]["kv_heads"]
    table.caption = "KV heads are replicated: more ranks than KV heads" if copies > 0 else None
    table.caption_justify = "left"
    return table


def _memory_heading(report: dict[str, Any]) -> list[str]:
    return [] if report["memory_bytes"] is None else ["fit"]


def _cells(one: dict[str, Any], report: dict[str, Any]) -> list[str]:
    from cluster.kv_arithmetic import format_size

    sizes = [format_size(one[name]) for name in ("bytes_per_token", "sequence_bytes", "batch_block_bytes")]
    fit = [] if report["memory_bytes"] is None else [f"{one['memory_sequences']:,}"]
    return [str(one["kv_heads"]), *sizes, *fit]


def _table(first: str, *others: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
