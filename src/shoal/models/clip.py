"""Image towers of CLIP- and SigLIP-like models with a zero-shot head, by transformers.

The features are the image's embedding, of norm 1. The head starts as the zero-shot classifier: the weights of
class c are the mean, normalised again, of the embeddings of its prompts, times the model's own scale, and the
bias is the model's. Any algorithm fine-tunes it.

Reference: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021;
Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from shoal.data.text import from_hub, load_tokenizer
from shoal.errors import InputError
from shoal.models.backbones import Backbone
from shoal.models.feature_model import FeatureModel, with_head
from shoal.models.language import read_model
from shoal.settings import Range
from shoal.vision import load

PREFIX = "clip:"
"""Before the name or folder of such a model."""
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
NORMALIZATION = {
    **dict.fromkeys(("clip", "chinese_clip", "metaclip_2"), OPENAI),
    **dict.fromkeys(("siglip", "siglip2"), HALF),
}
"""Mean and deviation of images by the kind of model."""


def build(
    name: str,
    input_shape: tuple[int, ...],
    classes: int | None,
    *,
    class_names: list[str] | None = None,
    prompts: list[str] | str = "a photo of a {}.",
    zero_shot: bool = True,
    pretrained: bool = True,
    frozen: bool = False,
    dropout: Annotated[float, Range(0, below=1)] = 0.0,
) -> FeatureModel:
    """Build an image tower with a linear head that starts as a zero-shot classifier; see also LoRA's options.

    Args:
        name: name or folder of the model.
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        class_names: names of the classes, in order, as prompts are to call them (default: the dataset's).
        prompts: templates with ``{}`` for the class; their embeddings are averaged.
        zero_shot: start the head from the prompts; otherwise it is random.
        pretrained: use the published weights, or those in the folder; otherwise random ones, and no prompts.
        frozen: train only the head, on features of images without augmentation.
        dropout: dropout rate of the features.
    """
    transformers = load("transformers", "text")
    config = from_hub("model", name, transformers.AutoConfig.from_pretrained)
    if config.model_type not in NORMALIZATION:
        kinds = ", ".join(NORMALIZATION)
        raise InputError(f"model 'clip:{name}' is of kind {config.model_type!r}; such models are {kinds}.")
    side = config.vision_config.image_size
    if tuple(input_shape) != (3, side, side):
        raise InputError(
            f"model 'clip:{name}' takes images (3, {side}, {side}), not {input_shape}; set size={side}."
        )
    if pretrained:
        model, _ = read_model(name, config)
    else:
        model = from_hub("model", name, lambda name, **_: transformers.AutoModel.from_config(config))
    features = Backbone(Tower(model), *NORMALIZATION[config.model_type], frozen=frozen)
    made = with_head(name, features, input_shape, classes, dropout)
    if pretrained:
        made.weights = f"{name} of transformers {transformers.__version__}"
        if zero_shot and classes is not None:
            head: Any = made.head[-1] if isinstance(made.head, nn.Sequential) else made.head
            templates = [prompts] if isinstance(prompts, str) else prompts
            with torch.no_grad():
                head.weight.copy_(_zero_shot(name, model, class_names or [], templates, classes))
                head.bias.fill_(float(getattr(model, "logit_bias", torch.zeros(1))))
    return made


def _zero_shot(name: str, model: Any, classes: Sequence[str], prompts: Sequence[str], count: int) -> Tensor:
    """The weights of the zero-shot classifier, (classes, features)."""
    if len(classes) != count:
        raise InputError(
            f"model 'clip:{name}' needs class_names, one for each of {count} classes, for its prompts; got "
            f"{list(classes)}. Set zero_shot=False for a random head."
        )
    if not prompts or any("{}" not in template for template in prompts):
        raise InputError(f"prompts must be templates with {{}} for the class, got {list(prompts)}.")
    tokenizer, length = load_tokenizer(name), model.config.text_config.max_position_embeddings
    options = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
    rows, known = list[Tensor](), dict[Any, str]()
    for each in classes:
        texts = [template.replace("{}", each.strip()) for template in prompts]
        tokens = tokenizer(texts, **options)
        if (first := tuple(tokens["input_ids"][0].tolist())) in known:
            equal = f"the classes {known[first]!r} and {each!r} give equal prompts"
            raise InputError(f"{equal} for its tokenizer, {texts[0]!r}; rename one.")
        known[first] = each
        try:
            names = [key for key in ("input_ids", "attention_mask") if key in tokens]
            found = model.get_text_features(**{key: tokens[key] for key in names})
        except IndexError as error:
            why = "the tokenizer gives tokens that the text tower does not have"
            raise InputError(f"model 'clip:{name}': {why}; they do not belong together.") from error
        embedded = found if isinstance(found, Tensor) else found.pooler_output
        rows.append(model.logit_scale.exp() * normalize(normalize(embedded).mean(0), dim=0))
    return torch.stack(rows)


class Tower(nn.Module):
    """Images, normalised as the model wants them, to embeddings of norm 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision, self.projection = model.vision_model, getattr(model, "visual_projection", nn.Identity())
        self.config = model.config

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = normalize(self.projection(self.vision(pixel_values=x).pooler_output))
        return found
