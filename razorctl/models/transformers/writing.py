"""How causal language models of transformers continue texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from razorctl.models import tokens
from razorctl.models.transformers.pretrained_files import quiet_transformers

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Writer:
    """A model that continues texts, and answers conversations.

    Args:
        ends: the tokens that end a text.
        longest: the most tokens of a text with its continuation; None if there is no limit.
    """

    model: "nn.Module"
    tokenizer: Any
    ends: Sequence[int]
    longest: int | None

    def prompt(self, row: Mapping[str, Any]) -> list[int]:
        """The tokens of a row with a `text` or `messages`; raises what `tokens.prompt` raises."""
        return tokens.prompt(self.tokenizer, row)

    def continued(
        self, prompts: Sequence[Sequence[int]], new: int, drawn: "Callable[[Tensor], Tensor]"
    ) -> list[str]:
        """What follows each prompt: at most so many new tokens, up to one that ends a text.

        drawn: is given the logits [prompts, vocabulary] of each next token, fp32; the greatest of
        what it returns is taken.
        """
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        model: Any = self.model
        longest, filler = max(map(len, prompts)), self.tokenizer.pad_token_id
        # Padded on the left, so that all prompts end where the new tokens begin.
        ids = [[*[filler] * (longest - len(own)), *own] for own in prompts]
        real = [[0] * (longest - len(own)) + [1] * len(own) for own in prompts]
        settings = GenerationConfig(
            max_new_tokens=new, eos_token_id=[*self.ends] or None, pad_token_id=filler
        )
        with quiet_transformers():
            found = model.generate(
                torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(real, device=model.device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([lambda _, scores: drawn(scores)]),
            )
        written = zip(prompts, found[:, longest:].tolist(), strict=True)
        return [self._text(own, new_ids) for own, new_ids in written]

    def _text(self, prompt: Sequence[int], written: Sequence[int]) -> str:
        """New tokens as text, with the space, if any, between it and the prompt."""
        end = next((at for at, token in enumerate(written) if token in self.ends), len(written))
        texts = prompt, [*prompt, *written[:end]], written[:end]
        before, whole, alone = (
            self.tokenizer.decode(ids, skip_special_tokens=True) for ids in texts
        )
        # A prompt may end inside a character, which its new tokens then complete.
        text: str = whole[len(before) :] if whole.startswith(before) else alone
        return text


def writer(model: Any, tokenizer: Any, longest: int | None) -> Writer:
    """What continues texts with a model, which loses the settings of generation that it came with.

    These may say, for one, that tokens are drawn; only its end tokens are kept.
    """
    from transformers import GenerationConfig

    known = model.generation_config.eos_token_id
    ends = {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id} - {None}
    model.generation_config = GenerationConfig()
    return Writer(model, tokenizer, sorted(ends), longest)
