"""Recurrent networks: torch's layers, cells in loops, dropped weights and packed sequences."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.case import WITHOUT_CHECKPOINT, Case, TrainingState
from tests.zoo.inputs import greedy, mean_square, next_token, own_loss, sequences, tokens

VOCABULARY, WIDTH, LENGTH = 23, 10, 6


class RNNModel(nn.Module):
    """torch's word language model: encoder, any recurrence, decoder that may be tied."""

    def __init__(self, rnn_type: str, tie_weights: bool = False, **more: Any) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = getattr(nn, rnn_type)(WIDTH, WIDTH, batch_first=True, **more)
        self.decoder = nn.Linear(WIDTH * (2 if more.get("bidirectional") else 1), VOCABULARY)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, ids, hidden=None):
        output, _ = self.rnn(self.drop(self.encoder(ids)), hidden)
        return self.decoder(self.drop(output))


class CustomGRUCell(nn.Module):
    """Matrices made by hand, stacked in one parameter and split in forward."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(3 * size, size))
        self.U = nn.Parameter(torch.empty(3 * size, size))
        self.b = nn.Parameter(torch.zeros(3, size))
        self.h0 = nn.Parameter(torch.zeros(size))
        for p in (self.W, self.U):
            for chunk in p.data.chunk(3):
                nn.init.orthogonal_(chunk)

    def forward(self, x, h):
        wr, wz, wn = self.W.chunk(3)
        ur, uz, un = self.U.chunk(3)
        r = torch.sigmoid(x @ wr.t() + h @ ur.t() + self.b[0])
        z = torch.sigmoid(x @ wz.t() + h @ uz.t() + self.b[1])
        n = torch.tanh(x @ wn.t() + r * (h @ un.t()) + self.b[2])
        return (1 - z) * n + z * h


class CustomGRU(nn.Module):
    """The initial state is a parameter of the cell, read by the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = CustomGRUCell(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = self.cell.h0.expand(x.shape[0], -1)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


class WeightDrop(nn.Module):
    """AWD-LSTM: the raw weight lies beside, and each forward sets the dropped one as an attribute."""

    def __init__(self, module: nn.Module, names: list[str], dropout: float) -> None:
        super().__init__()
        self.module, self.names, self.dropout = module, names, dropout
        for name in names:
            w = getattr(module, name)
            del module._parameters[name]
            module.register_parameter(name + "_raw", nn.Parameter(w.data))
        # cuDNN's flat weights are out of use then.
        module.flatten_parameters = lambda *_: None

    def forward(self, *args):
        for name in self.names:
            raw = getattr(self.module, name + "_raw")
            # In evaluation F.dropout returns the parameter itself, which setattr would register.
            dropped = F.dropout(raw, p=self.dropout) if self.training else raw.clone()
            setattr(self.module, name, dropped)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.module(*args)


class AWDLSTM(nn.Module):
    """Dropped weights, dropped words (``F.embedding`` of a masked weight) and a tied decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnns = nn.ModuleList(
            [WeightDrop(nn.LSTM(WIDTH, WIDTH), ["weight_hh_l0"], 0.3) for _ in range(2)]
        )
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids):
        weight = self.encoder.weight
        if self.training:
            mask = weight.data.new().resize_((weight.size(0), 1)).bernoulli_(0.9).expand_as(weight) / 0.9
            weight = mask * weight
        x = F.embedding(ids, weight, -1, None, 2.0, False, False).transpose(0, 1)
        for rnn in self.rnns:
            x, _ = rnn(x)
        return self.decoder(x.transpose(0, 1))


class TaggedSentences(nn.Module):
    """Packed sequences of several lengths, and a conditional random field of transitions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, 6, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True)
        self.emit = nn.Linear(12, 4)
        self.transitions = nn.Parameter(torch.randn(4, 4))
        self.transitions.data[0, :] = -10.0
        self.start = nn.Parameter(torch.zeros(4))

    def forward(self, ids):
        lengths = torch.arange(ids.shape[0]) + LENGTH - ids.shape[0] + 1
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        emissions = self.emit(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])
        tags = ids[:, : emissions.shape[1]] % 4
        alpha = self.start + emissions[:, 0]
        gold = self.start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.transitions, 1) + emissions[:, t]
            gold = gold + self.transitions[tags[:, t - 1], tags[:, t]]
            gold = gold + emissions[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
        return (alpha.logsumexp(1) - gold).mean()


def truncated(state: TrainingState, ids: torch.Tensor) -> torch.Tensor:
    """Carry the hidden state from step to step, detached (``repackage_hidden``)."""
    hidden = state.memory.get("hidden")
    output, hidden = state.model.rnn(state.model.encoder(ids), hidden)
    logits = state.model.decoder(output)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    state.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 0.25)
    state.optimizer.step()
    state.memory["hidden"] = hidden.detach()
    return loss


def recurrent(name: str, build: Any, **more: Any) -> Case:
    """Return a case of a recurrent language model."""
    return Case(
        f"own/recurrent/{name}", build, **({"batch": tokens(VOCABULARY, LENGTH), "loss": next_token} | more)
    )


CASES = [
    recurrent("lstm", lambda: RNNModel("LSTM", num_layers=2, dropout=0.2), generate=greedy),
    recurrent("lstm-tied", lambda: RNNModel("LSTM", tie_weights=True)),
    recurrent("gru", lambda: RNNModel("GRU", num_layers=2)),
    recurrent("bidirectional", lambda: RNNModel("LSTM", bidirectional=True)),
    recurrent("rnn-tanh", lambda: RNNModel("RNN", nonlinearity="tanh")),
    Case("own/recurrent/custom-gru", CustomGRU, sequences(LENGTH, WIDTH), mean_square),
    recurrent("awd-lstm", AWDLSTM),
    recurrent("tagged-sentences", TaggedSentences, loss=own_loss),
    recurrent("truncated-submodules", lambda: RNNModel("GRU"), step=truncated, variants=WITHOUT_CHECKPOINT),
]
