"""Why the kernel tables cannot time a deployment, in a clause: what was not timed, of the shape that is asked for."""

from __future__ import annotations

import re
from re import Match


def reason_of(problem: str) -> str:
    """A message of the tables in a clause of ours; one that is not known is shortened to a line, without paths."""
    for pattern, clause in _CLAUSES:
        if (match := re.search(pattern, problem)) is not None:
            return clause(match) if callable(clause) else match.expand(clause)
    return " ".join(problem.partition(" at /")[0].split()).removeprefix("perf database error: ")


def _attention(match: Match[str]) -> str:
    fields = _fields(match["key"])
    window = int(fields.get("window_size", 0))
    heads = fields.get("n_kv_lookup", fields.get("n_kv", "?"))
    kept = f"keys in {fields.get('kv_quant', '?').lower()}"
    within = f" within {window:,} tokens" if window else ""
    return f"no attention of heads of {fields.get('head_size', '?')} with {heads} KV heads{within} and {kept} was timed"


def _encoder(match: Match[str]) -> str:
    return f"no encoder attention of heads of {_fields(match['key']).get('head_size', '?')} was timed"


def _experts(match: Match[str]) -> str:
    fields = _fields(match["key"])
    count, chosen, quant = (fields.get(name, "?") for name in ("num_experts", "topk", "quant"))
    width = f" of width {fields['inter_size']}" if "inter_size" in fields else ""
    return f"no experts in {quant.lower()} were timed, {chosen} of {count}{width}"


def _fields(key: str) -> dict[str, str]:
    """The fields of a key of the tables as they print it: `Key { name: value, ... }`."""
    return {name: value.strip("\"' ") for name, value in re.findall(r"(\w+): ([^,{}]+)", key)}


def _blocks(match: Match[str]) -> str:
    fields = _fields(match["key"])
    kept = ", ".join(f"{what} in {fields[name].lower()}" for name, what in _QUANTS if name in fields)
    return f"no blocks of sparse attention with {kept} were timed"


def _loaded(match: Match[str]) -> str:
    return f"no blocks of {_BLOCKS.get(match['what'], match['what'])} attention were timed"


_BLOCKS = {"msa": "block-sparse", "dsa": "sparse latent", "dsv4": "compressed"}
_QUANTS = (("kv_quant", "keys"), ("gemm_quant", "matrices"))
_CLAUSES = (
    (r"GEMM perf data missing for quant '?(?P<quant>\w+)'?", r"no matrices in \g<quant> were timed"),
    (r"(?:generation|context) attention data missing for \w+ ?\{(?P<key>[^}]*)", _attention),
    (r"module data missing for \w+ ?\{(?P<key>[^}]*)", _blocks),
    (r"MoE data missing for \w+ ?\{(?P<key>[^}]*)", _experts),
    (r"no \w+ module rows loaded.*?(?P<what>[a-z]+\d*)_\w*module_perf", _loaded),
    (r"encoder attention data missing for \w+ ?\{(?P<key>[^}]*)", _encoder),
    (r"no encoder-attention rows loaded", "no encoder attention was timed on this GPU under this engine"),
    (r"quant mode '(?P<quant>\w+)' needs", r"the GPU has no arithmetic in \g<quant>"),
    (r"Parallelism width mismatch", "its GPUs share attention and experts in another way than the tables know"),
)
