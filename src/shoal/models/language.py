"""DistilBERT, BERT and other encoders of text as a :class:`~shoal.models.FeatureModel`, by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from torch import Tensor, nn

from shoal.data.text import from_hub, is_folder
from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel, linear_head
from shoal.settings import Range
from shoal.vision import load

NAMES = (
    *("distilbert-base-uncased", "distilbert-base-cased", "distilroberta-base"),
    *("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "roberta-base", "roberta-large"),
    *("albert-base-v2", "xlm-roberta-base"),
)
"""Names without an owner before a slash that are offered."""


def known(name: str) -> bool:
    """Whether it is a folder, or the name of an encoder of text."""
    return name in NAMES or "/" in name or is_folder(name)


def build(
    name: str,
    input_shape: tuple[int, ...],
    classes: int | None,
    *,
    pretrained: bool = True,
    dropout: Annotated[float, Range(0, below=1)] | None = None,
) -> FeatureModel:
    """Build a text encoder with a linear head; see also the options of LoRA.

    The features are those before the last layer of the published classifier: for DistilBERT, the state of the
    first token after a linear layer and ReLU; for BERT and others, its pooled state. Inputs are mappings with
    ``input_ids`` and ``attention_mask`` (B, L).

    Args:
        name: name or folder of the encoder.
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        pretrained: use the published weights, or those in the folder (only safetensors are read).
        dropout: dropout rate of the features (default: that of the published classifier).
    """
    if len(input_shape) != 1:
        raise InputError(f"model {name!r} takes text, input_shape (tokens,); not {input_shape}.")
    body, new = _encoder(name, pretrained)
    config: Any = body.config
    rate: Any = getattr(config, "classifier_dropout", None)
    rate = getattr(config, "hidden_dropout_prob", 0.1) if rate is None else rate
    width, layer = int(config.hidden_size), None
    if config.model_type == "distilbert":  # whose published classifier has a layer of its own before the last
        rate, layer = config.seq_classif_dropout, nn.Linear(width, width)
    # RoBERTa and its kin count positions from behind the padding's.
    tables = [m for n, m in body.named_modules() if n.endswith("position_embeddings")]
    most = min((m.num_embeddings - (m.padding_idx or -1) - 1 for m in tables), default=input_shape[0])
    if most < input_shape[0]:
        raise InputError(f"model {name!r} takes {most} tokens, not {input_shape[0]}; set max_tokens.")
    head = linear_head(width, classes, rate if dropout is None else dropout)
    for module in (layer, *head.modules()):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=float(getattr(config, "initializer_range", 0.02)))
            nn.init.zeros_(module.bias)
    return FeatureModel(Encoder(body, layer, new), head).train()


def read_model(name: str, config: Any, optional: str | None = None) -> tuple[Any, list[nn.Parameter]]:
    """A model with its published weights, and its parameters, called ``optional``, that have none."""
    transformers = load("transformers", "text")
    transformers.utils.logging.set_verbosity_error()  # of weights that are not needed
    transformers.utils.logging.disable_progress_bar()

    def read(name: str, **options: Any) -> tuple[Any, list[nn.Parameter]]:
        options |= {"config": config, "output_loading_info": True, "use_safetensors": True}
        model, info = transformers.AutoModel.from_pretrained(name, **options)
        missing = sorted(info["missing_keys"])
        if lacking := [key for key in missing if optional is None or optional not in key]:
            why = f"its weights lack {len(lacking)} of the model's, such as {lacking[0]!r}"
            raise ValueError(f"{why}: they belong to a different model than config.json")
        return model.float(), [p for n, p in model.named_parameters() if n in missing]

    return from_hub("model", name, read)


def _encoder(name: str, pretrained: bool) -> tuple[Any, list[nn.Parameter]]:
    transformers = load("transformers", "text")
    config = from_hub("model", name, transformers.AutoConfig.from_pretrained)
    kinds = transformers.models.auto.modeling_auto
    both = (kinds.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, kinds.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    # Left-to-right models are none: the first token knows nothing of the others. Nor are wrappers of other
    # libraries, which might read any file that the configuration names.
    if config.is_encoder_decoder or not all(config.model_type in names for names in both):
        raise InputError(f"model {name!r} is not a text encoder, such as BERT, but {config.model_type!r}.")
    config._attn_implementation = None  # one of a folder may be code that would be downloaded and run
    if pretrained:
        return read_model(name, config, "pooler")
    return from_hub("model", name, lambda name, **_: (transformers.AutoModel.from_config(config), []))


class Encoder(nn.Module):
    """From token ids and a mask to one vector per text; ``new`` are parameters without pretrained weights."""

    def __init__(self, body: Any, layer: nn.Linear | None, new: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.body, self.layer, self.new = body, layer, tuple(new)

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        if not isinstance(x, Mapping):
            raise InputError("a text model takes a mapping with input_ids and attention_mask.")
        try:
            output = self.body(input_ids=x["input_ids"], attention_mask=x["attention_mask"])
        except IndexError as error:
            token, known = int(x["input_ids"].max()), self.body.get_input_embeddings().num_embeddings
            why = f"the tokenizer gives the token {token}, and the model has {known:,}"
            raise InputError(f"{why}: they do not belong together.") from error
        if self.layer is not None:
            return self.layer(output.last_hidden_state[:, 0]).relu()
        pooled: Tensor | None = getattr(output, "pooler_output", None)
        return output.last_hidden_state[:, 0] if pooled is None else pooled
