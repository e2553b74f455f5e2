"""Joined texts: several short texts or conversations per sequence, so that little is padding.

A micro-batch is joined as a whole, so it has the same texts, and the same gradient, as a padded
one. The positions of each text begin at 0. From these, transformers makes a mask that lets no text
attend to another.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

MULTIPLE = 8  # tokens; kernels of matrix products are made for multiples of it
FEW = 6  # shapes of micro-batches in CUDA graphs
PAYS = 0.8  # the share of the padded tokens at which packing is the default
ROUNDING, ROUNDED = 1e-3, 3e-2  # of the largest logit, in single and in half precision
GROUPED = 50  # batches whose rows are sorted by length if texts are not packed
SAMPLE = 64  # micro-batches from which the gain is estimated


Shape = tuple[int, int]  # the sequences of a micro-batch, and their width in tokens


def rounded(tokens: int, most: int, widths: Sequence[int] = ()) -> int:
    """Tokens rounded up to one of some widths, else to MULTIPLE, and at most `most`.

    widths: ascending.
    """
    wider = next((width for width in widths if width >= tokens), None)
    return max(tokens, min(most, wider or -(-tokens // MULTIPLE) * MULTIPLE))


def few_widths(lengths: Iterable[int], most: int) -> tuple[int, ...]:
    """At most FEW widths to which texts of these lengths are padded, in ascending order.

    While there are more, the lower of two neighbors goes, where that adds the least padding.
    """
    count = Counter(rounded(length, most) for length in lengths)
    while len(count) > FEW:
        pairs = pairwise(sorted(count))
        lower, upper = min(pairs, key=lambda pair: count[pair[0]] * (pair[1] - pair[0]))
        count[upper] += count.pop(lower)
    return tuple(sorted(count))


def layout(
    lengths: Sequence[int], most: int, shapes: Sequence[Shape] = ()
) -> tuple[list[list[int]], int]:
    """The sequences of a micro-batch, each as indices of its texts, and their width in tokens.

    Longer texts are placed first (first fit, decreasing). No sequence is longer than `most`, and
    there are no more tokens than in the padded micro-batch.

    Args:
        lengths: the tokens of each text, at most `most`.
        shapes: of `few_shapes`. The result has the first shape into which the texts fit, if need be
            with empty sequences. If none is large enough, it has a multiple of the last shape's
            sequences.
    """
    longest = max(lengths)
    for count, width in shapes or [fewest_tokens([lengths], longest, most)]:
        if width >= longest:
            rows, sequences, taken = _first_fit(lengths, width), count, width
            if len(rows) <= count:
                break
    wanted = min(len(lengths), -(-len(rows) // sequences) * sequences)
    return rows + [[] for _ in range(wanted - len(rows))], taken


def few_shapes(
    micro_batches: Sequence[Sequence[int]], longest: int, most: int, few: int = FEW
) -> tuple[Shape, ...]:
    """At most `few` shapes into which micro-batches like these fit, by their numbers of tokens.

    Micro-batches of similar size share a shape. Arguments: see `fewest_tokens`.
    """
    ordered, count = sorted(micro_batches, key=sum), len(micro_batches)
    parts = [ordered[n * count // few : (n + 1) * count // few] for n in range(few)]
    shapes = {fewest_tokens(part, max(map(max, part)), most) for part in parts[:-1] if part}
    shapes.add(fewest_tokens(parts[-1], longest, most))
    return tuple(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1])))


def fewest_tokens(micro_batches: Sequence[Sequence[int]], longest: int, most: int) -> Shape:
    """The number and the width of sequences into which each micro-batch fits.

    For each number of sequences, tries the width at which they hold the largest micro-batch, and
    takes the shape with the fewest tokens.

    Args:
        micro_batches: the tokens of each of their texts.
        longest: the least width.
        most: the most tokens of a sequence.
    """
    total, texts = max(map(sum, micro_batches)), max(map(len, micro_batches))
    best: Shape | None = None
    for count in range(1, texts + 1):
        width = rounded(max(longest, math.ceil(total / count)), most)
        if width > most:
            continue
        rows = max(len(_first_fit(lengths, width)) for lengths in micro_batches)
        # Among equal ones the narrowest, with the least attention.
        if best is None or rows * width <= best[0] * best[1]:
            best = rows, width
        if width == rounded(longest, most):
            break
    assert best is not None
    return best


def _first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        row = next((row for row, left in enumerate(room) if left >= lengths[text]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(text)
        room[row] -= lengths[text]
    return rows


@dataclass(frozen=True)
class Gain:
    """The tokens of an epoch: `texts` without padding, and the tokens that are computed.

    padded, packed: in micro-batches drawn at random, estimated from SAMPLE of them. grouped: in
    padded micro-batches of texts of similar length, as used if texts are not packed.
    """

    texts: int
    padded: int
    packed: int
    grouped: int

    @property
    def share(self) -> float:
        """The tokens of packed micro-batches relative to padded ones."""
        return self.packed / self.padded

    @property
    def pays(self) -> bool:
        """Whether packing shortens an epoch by a fifth or more."""
        return self.share <= PAYS

    def average(self, packing: bool, micro_batches: float, rows: int, most: int) -> tuple[int, int]:
        """The sequences of an average micro-batch, and their width, as in `layout`.

        Args:
            packing: whether texts are packed.
            micro_batches: of an epoch.
            rows: the texts of each.
            most: the most tokens of a sequence.
        """
        tokens = (self.packed if packing else self.grouped) / micro_batches
        rows = math.ceil(tokens / most) if packing else rows
        return rows, min(most, rounded(math.ceil(tokens / rows), most))


def drawn(lengths: Sequence[int], micro_batch: int, most: int) -> list[list[int]]:
    """The tokens of the texts in SAMPLE micro-batches; the draw is always the same."""
    draw, cut = random.Random(0), [min(length, most) for length in lengths]
    return [draw.sample(cut, min(micro_batch, len(cut))) for _ in range(SAMPLE)]


def gain(
    lengths: Sequence[int], micro_batch: int, most: int, batch_size: int = 0, graphs: bool = False
) -> Gain:
    """The gain of packing texts of these lengths.

    Args:
        lengths: of all texts.
        micro_batch: texts in each.
        most: the most tokens of a text.
        batch_size: 0 for the micro-batch's.
        graphs: whether micro-batches have the few shapes that CUDA graphs take.
    """
    some = drawn(lengths, micro_batch, most)
    every, size = [min(length, most) for length in lengths], len(some[0])
    widths = few_widths(every, most) if graphs else ()
    shapes = few_shapes(some, max(every), most) if graphs else ()
    padded = packed = read = 0
    for texts in some:
        rows, width = layout(texts, most, shapes)
        read += sum(texts)
        padded += len(texts) * rounded(max(texts), most, widths)
        packed += len(rows) * width
    pool, grouped = GROUPED * (batch_size or size), 0
    every = random.Random(0).sample(every, len(every))
    for start in range(0, len(every), pool):
        ordered = sorted(every[start : start + pool])
        for at in range(0, len(ordered), size):
            part = ordered[at : at + size]
            grouped += len(part) * rounded(part[-1], most, widths)
    epoch = len(lengths) / (SAMPLE * size)
    return Gain(round(epoch * read), round(epoch * padded), round(epoch * packed), grouped)


def keeps_apart(model: "nn.Module", logits: "Callable[[nn.Module, Any], Tensor]") -> bool:
    """Whether a text's logits do not depend on the text before it in a sequence.

    The model is run twice, on a few tokens, in eval mode.
    """
    import torch

    weight = next(model.parameters())
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]], device=weight.device)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=weight.device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            both = logits(model, {"input_ids": ids, "position_ids": positions})[0, 4:].float()
            alone = logits(model, {"input_ids": ids[:, 4:]})[0].float()
    finally:
        model.train(training)
    rounding = ROUNDING if weight.dtype == torch.float32 else ROUNDED
    return bool((both - alone).abs().max() <= rounding * alone.abs().max())
