"""How causal language models of transformers continue texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from razorctl.models import chats
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
        """The tokens of a row with a `text` or `messages`; raises what `chats.prompt` raises."""
        with quiet_transformers():  # of a prompt beyond the tokens that were trained at once
            return chats.prompt(self.tokenizer, row)

    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        new: int,
        drawn: "Callable[[Tensor], Tensor]",
        write: Callable[[str], object] | None = None,
    ) -> list[str]:
        """The continuation of each prompt: at most `new` tokens, up to one that ends a text.

        drawn: takes the logits [prompts, vocabulary] of each next token, fp32; the token with the
        greatest result is chosen. write: called with each new piece of text of a single prompt.
        """
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        model: Any = self.model
        longest, filler = max(map(len, prompts)), self.tokenizer.pad_token_id
        # Padded on the left, so that all prompts end where the new tokens begin.
        ids = [[*[filler] * (longest - len(prompt)), *prompt] for prompt in prompts]
        real = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        settings = GenerationConfig(
            max_new_tokens=new, eos_token_id=[*self.ends] or None, pad_token_id=filler
        )
        with quiet_transformers():
            sequences = model.generate(
                torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(real, device=model.device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([lambda _, scores: drawn(scores)]),
                streamer=None if write is None else _streamer(self.tokenizer, write),
            )
        continuations = sequences[:, longest:].tolist()
        return [self._text(*pair) for pair in zip(prompts, continuations, strict=True)]

    def _text(self, prompt: Sequence[int], written: Sequence[int]) -> str:
        """New tokens as text, with the space between it and the prompt, if there is one."""
        end = next((at for at, token in enumerate(written) if token in self.ends), len(written))
        texts = prompt, [*prompt, *written[:end]], written[:end]
        before, whole, alone = (
            self.tokenizer.decode(ids, skip_special_tokens=True) for ids in texts
        )
        # A prompt may end inside a character, which the new tokens complete.
        text: str = whole[len(before) :] if whole.startswith(before) else alone
        return text


def _streamer(tokenizer: Any, write: Callable[[str], object]) -> Any:
    from transformers import TextStreamer

    class Pieces(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)


def writer(model: Any, tokenizer: Any, longest: int | None) -> Writer:
    """The Writer of a model. Resets the model's generation settings, except for the end tokens.

    Such settings may ask for random tokens, for example.
    """
    from transformers import GenerationConfig

    eos = model.generation_config.eos_token_id
    ends = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    model.generation_config = GenerationConfig()
    return Writer(model, tokenizer, sorted(ends), longest)
