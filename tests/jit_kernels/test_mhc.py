"""Hyper-connection weights against transformers' module and by their properties."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from sglang_dsv4x.jit_kernels.mhc import hc_split_sinkhorn


def test_equals_transformers() -> None:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    config = DeepseekV4Config(hidden_size=32, num_hidden_layers=1)
    module = DeepseekV4HyperConnection(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    streams = torch.randn(2, 7, config.hc_mult, 32)
    with torch.no_grad():
        post, comb, collapsed = module(streams)
        mixes = F.linear(module.input_norm(streams.flatten(2)), module.fn)
        got = hc_split_sinkhorn(
            mixes, module.scale, module.base, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps
        )
    torch.testing.assert_close(got.post, post)
    torch.testing.assert_close(got.comb, comb)
    torch.testing.assert_close((got.pre.unsqueeze(-1) * streams).sum(2), collapsed)


def test_shapes_are_those_that_the_model_passes() -> None:
    got = hc_split_sinkhorn(torch.randn(5, 1, 24), torch.ones(3), torch.zeros(24), 4, 20, 1e-6)
    assert (got.pre.shape, got.post.shape, got.comb.shape) == ((5, 1, 4), (5, 1, 4), (5, 1, 4, 4))
    assert hc_split_sinkhorn(torch.randn(0, 1, 24), torch.ones(3), torch.zeros(24)).comb.shape == (0, 1, 4, 4)


def test_combination_is_doubly_stochastic() -> None:
    comb = hc_split_sinkhorn(torch.randn(50, 24), torch.ones(3), torch.zeros(24), 4, 50, 1e-6).comb
    torch.testing.assert_close(comb.sum(-1), torch.ones(50, 4), rtol=0, atol=1e-3)
    torch.testing.assert_close(comb.sum(-2), torch.ones(50, 4), rtol=0, atol=1e-4)
    assert (comb > 0).all()


def test_signature_is_the_one_it_replaces() -> None:
    # SGLang's module needs tilelang, so the names stand here.
    names = list(inspect.signature(hc_split_sinkhorn).parameters)
    assert names == ["mixes", "hc_scale", "hc_base", "hc_mult", "sinkhorn_iters", "eps"]
