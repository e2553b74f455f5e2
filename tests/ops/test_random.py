import torch

from razorctl.ops.random import uniform


def test_uniform_in_range_and_independent(device):
    rows = torch.stack([uniform(torch.tensor(s, device=device), 0, 50_000) for s in range(8)])
    assert rows.dtype == torch.float32
    assert rows.min() >= 0
    assert rows.max() < 1
    assert (rows.mean(1) - 0.5).abs().max() < 0.006  # four standard errors and a half
    assert (rows.var(1) - 1 / 12).abs().max() < 0.002
    shifted = [rows[:, :-lag].flatten() @ rows[:, lag:].flatten() for lag in (1, 2, 64)]
    assert all(abs(s / (8 * 50_000) - 0.25) < 0.002 for s in shifted)
    assert (torch.corrcoef(rows) - torch.eye(8, device=device)).abs().max() < 0.02


def test_a_part_draws_what_the_whole_does(device):
    seed = torch.tensor(7, device=device)
    whole = uniform(seed, 2**31 - 500, 1000)  # across the end of int32
    parts = [uniform(seed, 2**31 - 500, 300), uniform(seed, 2**31 - 200, 700)]
    assert torch.equal(torch.cat(parts), whole)


def test_known_numbers():
    """The numbers that every implementation must draw, computed with Python's integers."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    for seed in (0, 1, 123456789, 2**31 - 1):
        want = [(mixed(mixed(i) ^ mixed(seed)) >> 8) / 2**24 for i in range(5, 25)]
        assert uniform(torch.tensor(seed), 5, 20).tolist() == want
