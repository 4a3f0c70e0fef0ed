"""Networks on graphs: message passing by scatter, attention on edges, relations and geometry."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import generator, own_loss

NODES, EDGES, SIZE = 9, 20, 6


def graphs(step: int) -> dict[str, torch.Tensor]:
    """Return a random graph with features, positions, edge types and labels."""
    random = generator(step)
    return {
        "x": torch.randn(NODES, SIZE, generator=random),
        "pos": torch.randn(NODES, 3, generator=random),
        "edge_index": torch.randint(NODES, (2, EDGES), generator=random),
        "edge_type": torch.randint(3, (EDGES,), generator=random),
        "batch": torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2]),
        "y": torch.randint(4, (NODES,), generator=random),
    }


def aggregate(messages: torch.Tensor, index: torch.Tensor, size: int = NODES) -> torch.Tensor:
    """Sum messages at their targets."""
    return messages.new_zeros(size, *messages.shape[1:]).index_add_(0, index, messages)


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


class GATConv(nn.Module):
    """Attention vectors are parameters [1, heads, size]; a softmax over the edges of a target."""

    def __init__(self, a: int, b: int, heads: int = 2) -> None:
        super().__init__()
        self.lin = nn.Linear(a, heads * b, bias=False)
        self.att_src, self.att_dst = (nn.Parameter(torch.empty(1, heads, b)) for _ in range(2))
        for p in (self.att_src, self.att_dst):
            nn.init.xavier_uniform_(p)
        self.bias = nn.Parameter(torch.zeros(heads * b))
        self.heads = heads

    def forward(self, x, edge_index):
        h = self.lin(x).view(-1, self.heads, self.lin.out_features // self.heads)
        src, dst = edge_index
        alpha = F.leaky_relu((h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst], 0.2)
        alpha = torch.exp(alpha - alpha.max())
        alpha = alpha / (aggregate(alpha, dst)[dst] + 1e-16)
        return aggregate(h[src] * alpha.unsqueeze(-1), dst).flatten(1) + self.bias


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GATConv(SIZE, 4), GATConv(8, 2)])

    def forward(self, data):
        x = data["x"]
        for conv in self.convs:
            x = F.elu(conv(x, data["edge_index"]))
        return F.cross_entropy(x, data["y"])


class GIN(nn.Module):
    """Epsilons are elements of one parameter. Every layer has a readout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(2))
        self.mlps = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(SIZE, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, SIZE))
                for _ in range(2)
            ]
        )
        self.linears_prediction = nn.ModuleList([nn.Linear(SIZE, 4) for _ in range(3)])

    def forward(self, data):
        h, score = data["x"], 0
        hidden = [h]
        for layer, mlp in enumerate(self.mlps):
            pooled = aggregate(h[data["edge_index"][0]], data["edge_index"][1])
            h = F.relu(mlp(pooled + (1 + self.eps[layer]) * h))
            hidden.append(h)
        for h, linear in zip(hidden, self.linears_prediction, strict=True):
            score = score + linear(aggregate(h, data["batch"], 3))
        return F.cross_entropy(score, data["y"][:3])


class RGCN(nn.Module):
    """Relations share bases: the weights are a product of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bases = nn.Parameter(torch.randn(2, SIZE, 4) * 0.3)
        self.comp = nn.Parameter(torch.randn(3, 2))
        self.root = nn.Parameter(torch.randn(SIZE, 4) * 0.3)

    def forward(self, data):
        weight = (self.comp @ self.bases.view(2, -1)).view(3, SIZE, 4)
        out = data["x"] @ self.root
        for r in range(3):
            src, dst = data["edge_index"][:, data["edge_type"] == r]
            out = out + aggregate(data["x"][src] @ weight[r], dst)
        return F.cross_entropy(out, data["y"])


class GraphSAGE(nn.Module):
    """Dicts of layers by relation; maxima by ``scatter_reduce``."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_l, self.lin_r = (
            nn.ModuleDict({str(r): nn.Linear(SIZE, SIZE) for r in range(2)}) for _ in range(2)
        )

    def forward(self, data):
        x, (src, dst) = data["x"], data["edge_index"]
        for r in self.lin_l:
            index = dst[:, None].expand(-1, SIZE)
            pooled = torch.zeros_like(x).scatter_reduce(0, index, x[src], "amax", include_self=False)
            x = F.normalize(F.relu(self.lin_l[r](pooled) + self.lin_r[r](x)), dim=-1)
        return F.cross_entropy(x[:, :4], data["y"])


class EdgeNetwork(nn.Module):
    """Neural message passing: a network makes a matrix for each edge; a GRU updates; set2set reads out."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Embedding(3, SIZE * SIZE)
        self.gru = nn.GRU(SIZE, SIZE)
        self.lstm = nn.LSTM(2 * SIZE, SIZE)
        self.out = nn.Linear(2 * SIZE, 4)

    def forward(self, data):
        h, x = data["x"].unsqueeze(0), data["x"]
        for _ in range(2):
            weight = self.edge(data["edge_type"]).view(-1, SIZE, SIZE)
            m = aggregate(
                (weight @ x[data["edge_index"][0]].unsqueeze(-1)).squeeze(-1), data["edge_index"][1]
            )
            out, h = self.gru(F.relu(m).unsqueeze(0), h)
            x = out.squeeze(0)
        q_star, state = x.new_zeros(1, 3, 2 * SIZE), None
        for _ in range(2):
            q, state = self.lstm(q_star, state)
            e = (x * q[0][data["batch"]]).sum(-1).exp()
            a = e / aggregate(e, data["batch"], 3)[data["batch"]]
            q_star = torch.cat([q[0], aggregate(a[:, None] * x, data["batch"], 3)], -1).unsqueeze(0)
        return F.cross_entropy(self.out(q_star[0]), data["y"][:3])


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


class Forces(nn.Module):
    """SchNet: forces are the derivative of the energy, which training differentiates again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, SIZE)
        self.filters = nn.ModuleList(
            [nn.Sequential(nn.Linear(5, SIZE), nn.Softplus(), nn.Linear(SIZE, SIZE)) for _ in range(2)]
        )
        self.register_buffer("offset", torch.linspace(0, 3, 5))
        self.out = nn.Linear(SIZE, 1)

    def forward(self, data):
        h, (src, dst) = self.embedding(data["y"]), data["edge_index"]
        distance = (data["pos"][src] - data["pos"][dst]).pow(2).sum(-1).add(1e-3).sqrt()
        basis = torch.exp(-((distance[:, None] - self.offset) ** 2))
        for f in self.filters:
            h = h + aggregate(h[src] * f(basis), dst)
        return self.out(h).sum()


def energies_and_forces(model: nn.Module, data: Any) -> torch.Tensor:
    """Return the loss of energy and forces of a molecule."""
    pos = data["pos"].clone().requires_grad_()
    energy = model({**data, "pos": pos})
    (forces,) = torch.autograd.grad(-energy, pos, create_graph=True)
    return (energy - 1).square() + forces.square().mean()


def forces_step(state: Any, data: Any) -> torch.Tensor:
    """Make a step through the forces inside ``double_backward``."""
    state.optimizer.zero_grad()
    with state.double_backward():
        loss = energies_and_forces(state.model, data)
        loss.backward()
    state.optimizer.step()
    return loss


CASES = [
    *(
        Case(f"own/graph/{name}", build, graphs, own_loss)
        for name, build in (
            ("gcn", GCN),
            ("gat", GAT),
            ("gin", GIN),
            ("rgcn", RGCN),
            ("graphsage", GraphSAGE),
            ("edge-network", EdgeNetwork),
            ("egnn", EGNN),
        )
    ),
    Case("own/graph/forces", Forces, graphs, own_loss, step=forces_step),
]
