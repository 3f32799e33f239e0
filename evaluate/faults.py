"""What an audit found wrong: read by the audit itself and by the report, which loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALARM = 0.001
"""p-value below which sampling fails: an exact sampler gets there once in a thousand runs."""


def failures(found: Mapping[str, Any] | None) -> list[str]:
    """What an audit found wrong, a sentence each; an audit that compared nothing has failed."""
    if not found:
        return ["nothing was audited"]
    said = []
    greedy_, pair, tie, sampled, kept = (found.get(k) or {} for k in ("greedy_fp32", "self_pair", "ties", "sampling", "identities"))
    if not greedy_.get("prompts"):
        said.append("no greedy text was compared with plain decoding")
    elif greedy_["identical"] != greedy_["prompts"]:
        said.append(
            f"{greedy_['prompts'] - greedy_['identical']} of {greedy_['prompts']} greedy texts in float32 differ from plain decoding's"
        )
    if pair and pair["token_acceptance"] != 1.0:
        said.append(f"a draft equal to its target scores {pair['token_acceptance']} instead of 1")
    if tie and tie["failed"]:
        said.append(f"{tie['failed']} greedy texts in {tie['dtype']} part from plain decoding's where the target is not near a tie")
    if sampled and sampled["p_value"] is not None and sampled["p_value"] < ALARM:
        said.append(f"tokens sampled with {sampled.get('arm', 'a draft')} do not follow the target's law: p = {sampled['p_value']:.2g}")
    if kept and kept["broken"]:
        said.append(f"{kept['broken']} of {kept['traces']} traces contradict themselves: {kept['first']}")
    return said
