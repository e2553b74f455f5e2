"""Language models of transformers: causal ones, and masked ones such as BERT's."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from razorctl.config.job import Job
from razorctl.models import chats, tokens
from razorctl.models.model import ANY, Model, RenderedChat, Shapes, Size, Transform
from razorctl.models.rows import Progress
from razorctl.models.transformers.pretrained_files import TOKENIZER_CONFIG, has_argument
from razorctl.models.transformers.pretrained_model import TextModel
from razorctl.models.transformers.writing import Writer, writer

if TYPE_CHECKING:
    from torch import Tensor, nn

# Functions of transformers that compute masks from positions.
MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
# Models that compute masks or positions without using the given positions, as runs have shown.
CROSSING = frozenset(("biogpt", "gpt_oss", "opt", "xglm"))
ATTENTIONS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))


@dataclass(frozen=True, kw_only=True)
class LanguageModel(TextModel):
    """A pretrained model that learns to predict the next token, or masked tokens.

    packing: as `Job.packing`.
    """

    packing: bool | None = None
    most_tokens: ClassVar[int] = 1024

    @property
    def auto(self) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

        return AutoModelForCausalLM if self.causal else AutoModelForMaskedLM

    @property
    def causal(self) -> bool:
        return self.task == "causal-lm"

    @property
    def pads(self) -> bool:
        return self.packing is not None

    def fed(self, job: Job) -> Model:
        no_packing = job.packing is None or not self.causal
        return self if no_packing else replace(self, packing=job.packing)

    def settings(self, classes: int) -> dict[str, Any]:
        return {}

    def transform(
        self, model: "nn.Module", input_size: Size = None, shapes: Shapes = ANY
    ) -> Transform:
        tokenizer = self.pretrained.tokenizer
        if not self.causal:
            return partial(tokens.masked_inputs, tokenizer, True)
        make = partial(tokens.causal_inputs, tokenizer, tokens=self.size(input_size))
        return partial(make, packing=self.packing, shapes=shapes)

    def masked(self, model: "nn.Module") -> Transform | None:
        tokenizer = self.pretrained.tokenizer
        return None if self.causal else partial(tokens.masked_inputs, tokenizer, False)

    def sequences(self, rows: Any, input_size: Size, progress: Progress) -> Any:
        make = tokens.token_blocks if self.packing is None else tokens.single_texts
        if "messages" in rows.column_names:
            make = chats.conversation_tokens
        return make(rows, self.pretrained.tokenizer, self.size(input_size), progress)

    def example(
        self, model: "nn.Module", batch_size: int, input_size: Size = None
    ) -> "dict[str, Tensor]":
        import torch

        ids = torch.zeros(batch_size, self.size(input_size), dtype=torch.long)
        if self.packing is None:
            return {"input_ids": ids}
        if self.packing:
            positions = torch.arange(ids.shape[1]).expand_as(ids).clone()
            positions[:, -1] = 0  # begins another text
            return {"input_ids": ids, "position_ids": positions}
        mask = torch.ones_like(ids)
        mask[:, -1] = 0  # most rows end in padding
        return {"input_ids": ids, "attention_mask": mask}

    def packs(self) -> bool:
        """Whether the model's own code separates the texts of one sequence by their positions.

        State-space, convolutional and linear-attention layers carry one text into the next.
        """
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        config = self.pretrained.config
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if not self.causal or kind is None or not has_argument(kind, "position_ids"):
            return False
        names = vars(sys.modules[kind.__module__])
        layers = {*(getattr(config, "layer_types", None) or ATTENTIONS)}
        return (
            any(name in names for name in MASKS)
            and config.model_type not in CROSSING
            and layers <= ATTENTIONS
            and not (getattr(config, "alibi", False) or "create_recurrent_attention_mask" in names)
        )

    def tokenizer(self, model: Any) -> Any:
        tokenizer = self.pretrained.tokenizer
        return tokenizer if self.packing is None else chats.templated(tokenizer)

    def check(self, model: Any, weights: bool) -> None:
        """Also tries the chat template of a causal model."""
        super().check(model, weights)
        if self.causal and self.pretrained.local(TOKENIZER_CONFIG):
            chats.check(self.pretrained.tokenizer)

    def sample(self, row: Mapping[str, Sequence[int]]) -> RenderedChat:
        tokenizer = self.pretrained.tokenizer
        return RenderedChat(bool(tokenizer.chat_template), chats.sample(tokenizer, row))

    def writer(self, model: "nn.Module") -> Writer:
        return writer(model, self.pretrained.tokenizer, self.pretrained.longest)
