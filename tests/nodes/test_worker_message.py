"""What worker processes send: many samples in one tensor, and every one of them as it was."""

from __future__ import annotations

import numpy as np
import torch

from evenstep.nodes.worker_message import pack_message, unpack_message
from evenstep.testing import assert_same


def test_a_message_holds_one_tensor_however_many_samples() -> None:
    values = [
        {
            "input_ids": torch.arange(k),
            "half": torch.full((2, k % 3), k, dtype=torch.bfloat16),
            "array": np.arange(k),
        }
        for k in range(9)
    ]
    message = pack_message(values)
    assert [type(part) for part in message] == [bytes, list, torch.Tensor]
    assert_same(unpack_message(message), values)


def test_tensors_that_are_more_than_their_bytes_travel_as_torch_sends_them() -> None:
    values = [
        torch.ones(3, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,  # a negative view
        torch.tensor([[0, 5], [0, 0]]).to_sparse(),
        torch.empty(0, 3),
        torch.arange(6).view(2, 3).T,
    ]
    received = unpack_message(pack_message(values))
    assert received[0].requires_grad
    for before, after in zip(values, received, strict=True):
        assert after.layout == before.layout
        assert_same(after.detach().to_dense().resolve_conj(), before.detach().to_dense().resolve_conj())
