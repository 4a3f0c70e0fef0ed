"""The page on pipelines, split tensors and sequences over ranks: its code runs, in order, on four ranks."""

from __future__ import annotations

import torch
from torch import nn

from tests.docs.snippets import snippets_of
from tests.integrations.transformers.mixtures import VOCABULARY as MIXTURE_VOCABULARY
from tests.integrations.transformers.mixtures import mixture_of
from tests.integrations.transformers.models import VOCABULARY, llama
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.parallel import make_mesh


class Blocks(nn.Module):
    """What the page calls model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(2):
            self.blocks.append(nn.Module())
            self.blocks[-1].wide, self.blocks[-1].narrow = nn.Linear(8, 16), nn.Linear(16, 8)


def cross_entropy(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


@on_ranks(4)
def test_the_page_runs(world: World) -> None:
    torch.manual_seed(world.seed)
    words = torch.randint(256, (8, 3))
    with snippets_of("how_to/parallel.md") as page:
        names = page.run_next()
        assert dict(zip(names["mesh"].mesh_dim_names, names["mesh"].shape, strict=True))["dp"] == 1
        page.run_next(model=Blocks())

        text = torch.randint(VOCABULARY, (2, 16))
        model = llama(world.seed)
        expected = nn.functional.cross_entropy(model(text).logits.flatten(0, 1), text.flatten())
        page.run_next(model=model, words=text, targets=text)
        torch.testing.assert_close(names["loss"], expected)

        page.run_next(model=llama(world.seed), batch={"input_ids": text, "labels": text})
        its_own = names["loss"].detach()
        page.run_next()
        torch.testing.assert_close(names["loss"].detach(), its_own)
        page.run_next(model=llama(world.seed))
        torch.testing.assert_close(
            torch.tensor(world.everyone(names["loss"].item())).mean(),
            torch.tensor(world.everyone(its_own.item())).mean(),
        )
        query, key, value = torch.randn(3, 2, 4, 4, 8)
        page.run_next(query=query, key=key, value=value)
        assert names["attended"].shape == query.shape

        page.run_next(inputs=words, targets=words, cross_entropy=cross_entropy, mesh=make_mesh(pp=2))
        assert names["loss"].isfinite() and names["held_out"] < names["loss"]

        folder = world.shared_folder()
        if world.rank == 0:
            llama(world.seed).save_pretrained(folder)
        world.barrier()
        page.run_next(folder=folder, words=text, mask=torch.ones_like(text), labels=text)
        expected = llama(world.seed)(input_ids=text, labels=text).loss
        torch.testing.assert_close(names["loss"], expected.detach())

        page.run_next()
        assert names["loss"].isfinite()
        hidden, loss = torch.randn(2, 3, 512), torch.tensor(0.0, device="cpu")
        page.run_next(make_expert=lambda number: nn.Linear(512, 512), hidden=hidden, loss=loss)
        assert names["mixed"].hidden.shape == hidden.shape

        mixture = mixture_of("mixtral", world.seed)
        if world.rank == 0:
            mixture.save_pretrained(folder / "mixture")
        world.barrier()
        own = torch.randint(MIXTURE_VOCABULARY, (1, 8))
        page.run_next(folder=folder / "mixture", batch={"input_ids": own, "labels": own})
        expected = mixture(input_ids=own, labels=own).loss
        torch.testing.assert_close(names["loss"], expected.detach(), rtol=1e-5, atol=0)
