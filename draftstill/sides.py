"""Which group of documents trains, validates or tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from draftstill.errors import DraftstillError

SPLITS = ("train", "validation", "test")


def choose_sides(groups: Mapping[int, bytes], documents: int, fraction: float, seed: int) -> dict[int, str]:
    """The split of each group, by the seed and the smallest digest among its documents: neither names nor the order of reading decide.

    A group's place does not hang on the others, so documents that come later move no document from the test into the training, as long as
    they join no group that was there. The share is therefore an expectation; a side that came out empty takes the nearest group.

    Args:
        groups: the smallest digest of each group's documents.
        documents: their number, for the message.
        fraction: expected share of groups that validate or test, half of it each.

    Raises:
        DraftstillError: too few groups for three sides at this share.
    """
    side = round(len(groups) * fraction / 2)
    if side == 0 or len(groups) <= 2 * side:
        raise DraftstillError(
            f"{documents} documents in {len(groups)} groups of near duplicates leave an empty split at this share",
            key="corpus.heldout_fraction", value=fraction,
            mend="give more documents that differ (a group of near duplicates stays on one side)" if len(groups) < 3
            else f"set it to at least {min(2 / len(groups) + 0.005, 0.99):.2f} and below 1, or give more documents" if side == 0
            else "set it lower, so that something is left to train on",
        )  # fmt: skip
    place = {g: int.from_bytes(hashlib.sha256(f"{seed}\0".encode() + digest).digest()[:8], "big") / 2**64 for g, digest in groups.items()}
    order = sorted(place, key=lambda g: (place[g], g))
    made = {g: "test" if place[g] < fraction / 2 else "validation" if place[g] >= 1 - fraction / 2 else "train" for g in order}
    if "test" not in made.values():
        made[order[0]] = "test"
    if "validation" not in made.values():
        made[order[-1]] = "validation"
    if "train" not in made.values():
        # Either end is needed where it is; of the others the one farthest from both.
        made[min(order[1:-1], key=lambda g: (abs(place[g] - 0.5), g))] = "train"
    return made
