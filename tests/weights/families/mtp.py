"""Tiny checkpoints with multi-token-prediction layers made of transformers' own modules, and what these compute."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer

from megatron_gspo.batch.trajectory import Trajectories
from tests.weights.parity import file_tensors, write

# transformers' names inside a layer -> those of published checkpoints
PUBLISHED = {"post_norm.": "shared_head.norm.", "mtp_block.": ""}
LENGTHS = (12, 20, 24, 8, 31, 5, 16, 11)
TEMPERATURE, WEIGHT = 0.8, 0.1


@dataclass(frozen=True)
class Further:
    """A checkpoint, the model in it, and its multi-token-prediction layers."""

    directory: Path
    model: PreTrainedModel
    layers: list[MtpLayer]


def write_further(directory: Path, model: PreTrainedModel, count: int, *, repeated: bool = True) -> Further:
    """`model` and `count` such layers behind it; `repeated`: each with the embedding and the output layer once more."""
    write(directory, model)
    torch.manual_seed(7)
    kind, norm = type(model.model.layers[-1]), type(model.model.norm)
    first = model.config.num_hidden_layers
    layers = [MtpLayer(model.config, kind, norm, first + k).eval() for k in range(count)]
    tensors = {}
    for number, layer in enumerate(layers, start=first):
        with torch.no_grad():
            for name, tensor in layer.state_dict().items():
                if tensor.dim() > 1:
                    tensor.normal_(std=0.2)
                else:
                    tensor.add_(0.3 * torch.randn(tensor.shape))
                tensors[f"model.layers.{number}.{published(name)}"] = tensor.clone()
        if repeated:
            tensors[f"model.layers.{number}.embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
            tensors[f"model.layers.{number}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(load_file(directory / "model.safetensors") | tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    return Further(directory, model, layers)


def published(name: str) -> str:
    for ours, theirs in PUBLISHED.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def trajectories(vocab_size: int) -> Trajectories:
    """Documents of LENGTHS tokens: prompts of two or three tokens, then responses with holes that do not train."""
    generator = torch.Generator().manual_seed(11)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    total = int(offsets[-1])
    mask = torch.rand(total, generator=generator) > 0.2
    for number, start in enumerate(offsets[:-1].tolist()):
        mask[start : start + 2 + number % 2] = False
    return Trajectories(
        rows=torch.arange(len(LENGTHS)),
        offsets=offsets,
        tokens=torch.randint(0, vocab_size, (total,), generator=generator),
        loss_mask=mask,
        logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int64),
    )


def expected(made: Further) -> tuple[float, dict[str, Tensor]]:
    """(mean over layers and trained tokens of -logp, gradients of WEIGHT times that by the checkpoint's names).

    One document at a time. Layer k reads at place i what the layer before it ends in there, and the embedding of token
    i + k, and predicts token i + k + 1.
    """
    body, held = made.model.model, trajectories(made.model.config.vocab_size)
    total, count = torch.zeros(()), 0
    for layer in made.layers:
        layer.zero_grad()
    for start, end in zip(held.offsets[:-1].tolist(), held.offsets[1:].tolist(), strict=True):
        tokens, mask = held.tokens[start:end][None], held.loss_mask[start:end]
        with torch.no_grad():
            hidden, embedded = body(input_ids=tokens).last_hidden_state, body.embed_tokens(tokens)
        for k, layer in enumerate(made.layers, start=1):
            places = torch.arange(tokens.shape[1] - k)[None]
            inputs = embedded[:, k:]
            causal = create_causal_mask(made.model.config, inputs, None, None, position_ids=places)
            hidden = layer(
                inputs,
                hidden[:, :-1] if k > 1 else hidden[:, :-k],
                body.rotary_emb(inputs, places),
                causal,
                places,
                None,
            )
            logits = hidden[0, :-1] @ made.model.lm_head.weight.detach().T / TEMPERATURE
            logp = logits.log_softmax(-1).gather(1, tokens[0, k + 1 :, None])[:, 0]
            total = total - logp[mask[k + 1 :]].sum()
            count += int(mask[k + 1 :].sum())
    trained = int(held.loss_mask.sum())
    (WEIGHT * total / (len(made.layers) * trained)).backward()
    first = made.model.config.num_hidden_layers
    raw = {
        f"model.layers.{first + number}.{published(name)}": parameter.grad
        for number, layer in enumerate(made.layers)
        for name, parameter in layer.named_parameters()
    }
    return float(total.detach()) / count, unstacked(raw)


def unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `file_tensors`: experts under their unfused names."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save_file({k: v.contiguous() for k, v in tensors.items()}, Path(folder) / "model.safetensors")
        return file_tensors(Path(folder))
