"""Networks on graphs: sparse arguments, and pairs of features and positions."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import generator, own_loss

NODES, EDGES, SIZE = 9, 20, 6


def graphs(step: int) -> dict[str, torch.Tensor]:
    """Return a random graph with features, positions and labels."""
    random = generator(step)
    return {
        "x": torch.randn(NODES, SIZE, generator=random),
        "pos": torch.randn(NODES, 3, generator=random),
        "edge_index": torch.randint(NODES, (2, EDGES), generator=random),
        "y": torch.randint(4, (NODES,), generator=random),
    }


def aggregate(messages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Sum messages at their targets."""
    return messages.new_zeros(NODES, *messages.shape[1:]).index_add_(0, index, messages)


class GCNConv(nn.Module):
    """Kipf's layer with a weight and a bias that are parameters, initialized by ``reset_parameters``."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.FloatTensor(a, b))
        self.bias = nn.Parameter(torch.FloatTensor(b))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        stdv = 1.0 / math.sqrt(self.weight.size(1))
        self.weight.data.uniform_(-stdv, stdv)
        self.bias.data.uniform_(-stdv, stdv)

    def forward(self, x, adj):
        return torch.sparse.mm(adj, torch.mm(x, self.weight)) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = GCNConv(SIZE, 8), GCNConv(8, 4)

    def forward(self, data):
        e = torch.cat([data["edge_index"], torch.arange(NODES).expand(2, -1)], 1)
        adj = torch.sparse_coo_tensor(e, torch.ones(e.shape[1]), (NODES, NODES)).coalesce()
        x = F.dropout(F.relu(self.gc1(data["x"], adj)), 0.3, training=self.training)
        return F.nll_loss(F.log_softmax(self.gc2(x, adj), dim=1), data["y"])


class EGNN(nn.Module):
    """Equivariant layers return pairs of features and positions."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge_mlp = nn.Sequential(nn.Linear(2 * SIZE + 1, 8), nn.SiLU())
            self.node_mlp = nn.Linear(SIZE + 8, SIZE)
            last = nn.Linear(8, 1, bias=False)
            torch.nn.init.xavier_uniform_(last.weight, gain=0.1)
            self.coord_mlp = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), last)

        def forward(self, h, x, edge_index):
            src, dst = edge_index
            diff = x[src] - x[dst]
            m = self.edge_mlp(torch.cat([h[src], h[dst], diff.pow(2).sum(-1, keepdim=True)], -1))
            x = x + aggregate(diff * self.coord_mlp(m), dst) / NODES
            return h + self.node_mlp(torch.cat([h, aggregate(m, dst)], -1)), x

    def __init__(self) -> None:
        super().__init__()
        for i in range(2):
            self.add_module(f"gcl_{i}", EGNN.Layer())

    def forward(self, data):
        h, x = data["x"], data["pos"]
        for i in range(2):
            h, x = self._modules[f"gcl_{i}"](h, x, data["edge_index"])
        return h.square().mean() + (x - data["pos"]).square().mean()


CASES = [
    Case("own/graph/gcn", GCN, graphs, own_loss),
    Case("own/graph/egnn", EGNN, graphs, own_loss),
]
