"""The layer that predicts further tokens of a model with residual streams, which transformers drops, beside one made of
its modules."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from tests.families.qwen4_exp import randomise
from tests.models.guesses import compare_guesses
from tests.tiny import make_runner, save_tiny_of, tiny_case


class Oracle:
    """The layer of a checkpoint with one, over whole sequences."""

    def __init__(self, folder: Path):
        self.main = save_tiny_of(folder, "qwen4_exp", eos_token_id=319)
        config, hidden = self.main.config, self.main.config.hidden_size
        self.mtp: Any = nn.Module()
        self.mtp.pre_fc_norm_embedding = theirs.Qwen4ExpTextRMSNorm(hidden)
        self.mtp.pre_fc_norm_hidden = theirs.Qwen4ExpTextRMSNorm(4 * hidden, group_size=hidden)
        self.mtp.fc_embedding, self.mtp.fc_hidden = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.mtp.layers = nn.ModuleList([theirs.Qwen4ExpTextDecoderLayer(config, 2)])
        self.mtp.hyper_connection_mixer = theirs.Qwen4ExpTextGatedResidual(config, use_combine=False)
        randomise(self.mtp.eval())
        own = {f"mtp.{name}": tensor.data.contiguous() for name, tensor in self.mtp.named_parameters()}
        save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors", {"format": "pt"})
        settings = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(settings))

    @torch.no_grad()
    def guesses(self, ids: list[int], depth: int) -> list[tuple[Tensor, int]]:
        """`depth` guesses of what follows `ids`, with their logits."""
        model, mtp, seen = self.main.model, self.mtp, list[Tensor]()
        hook = model.hyper_connection_mixer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        model(torch.tensor([ids[:-1]]))
        hook.remove()
        (streams,), guessed, known = seen, list[tuple[Tensor, int]](), ids[1:]
        for _ in range(depth):
            embedded = mtp.fc_embedding(mtp.pre_fc_norm_embedding(model.embed_tokens(torch.tensor([known]))))
            by_stream = mtp.fc_hidden(mtp.pre_fc_norm_hidden(streams).unflatten(-1, (4, -1)))
            begin = (by_stream + embedded[:, :, None]).flatten(-2)
            count = len(known)
            angles = model.rotary_emb(begin, torch.arange(count).expand(3, 1, -1))
            mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
            after = mtp.layers[0](begin, angles, attention_mask=mask)
            logits = self.main.lm_head(mtp.hyper_connection_mixer(after)[0, -1])
            guessed.append((logits, int(logits.argmax())))
            streams, known = torch.cat((streams, after[:, -1:]), 1), [*known, guessed[-1][1]]
        return guessed


def test_guesses_are_those_of_its_modules(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "model")
    case = tiny_case(
        tmp_path,
        tmp_path / "model",
        model_name="qwen4_exp",
        data_config={"batch_size": 2, "chunked_prefill_size": 9},
        draft_config={"method": "mtp", "tokens": 3},
    )
    loop = make_runner(case, tmp_path).loop
    model: Any = loop.engine.model
    last = model.get_submodule("mtp.hyper_connection_mixer")
    compare_guesses(loop, oracle.guesses, lambda streams: model.lm_head(last.collapse((streams,))))
