"""The tiles of a packed batch, which one kernel finds on the device; see :mod:`schedule`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashattn_triton.hopper.launch import hopper_launch
from flashattn_triton.hopper.schedule import FIELDS, SEQUENCES, most_tiles, packed_tiles_kernel
from flashattn_triton.mask_and_bias import Given
from flashattn_triton.problem import Problem


def without_offset(problem: Problem, given: Given) -> Problem:
    """The same problem where packed sequences have as many keys as queries.

    Their last query meets the last key on the diagonal that starts at the first of both.
    """
    if not given.has_equal_lengths or not problem.bottom_right:
        return problem
    return replace(problem, causal="top-left" if problem.causal == "bottom-right" else "none")


class PackedTiles:
    """The kernel that writes the tables of tiles of one kind of packed batch.

    ``most``: how many tiles of queries there can be, and how many of keys, if ``of_keys``.
    ``key_table``: the bytes before the table of keys.
    """

    def __init__(
        self,
        given: Given,
        tokens: tuple[int, int],
        rows: tuple[int, int],
        *,
        heads: int,
        group: int = 1,
        of_keys: bool = False,
    ) -> None:
        """Plans the launch.

        ``tokens``: queries and keys of all sequences. ``rows``: queries and keys of a tile.
        ``heads``: of queries. ``group``: how many tiles of one sequence are computed at the same
        time, see :func:`~flashattn_triton.hopper.schedule.packed_tiles_kernel`.
        """
        n, (n_queries, n_keys) = given.sequences, tokens
        of_key_side = most_tiles(n_keys, n, rows[1]) if of_keys else 0
        self.most = most_tiles(n_queries, n, rows[0]), of_key_side
        first_of_keys = (1 + self.most[0]) * FIELDS.value
        self.key_table = first_of_keys * 4
        self.launch = hopper_launch(
            packed_tiles_kernel,
            -(-(n + 1) // SEQUENCES) * (1 + of_keys),
            {"starts_q_ptr": torch.int32, "starts_k_ptr": torch.int32, "tiles_ptr": torch.int32},
            {
                "N_SEQUENCES": n,
                "N_QUERIES": n_queries,
                "N_KEYS": n_keys,
                "N_HEADS": heads,
                "GROUP": group,
                "KEY_TABLE": first_of_keys,
            },
            {"ROWS": rows[0], "KEY_ROWS": rows[1], "FIELDS": FIELDS.value, "SEQUENCES": SEQUENCES},
        )

    def __call__(self, given: Given) -> Tensor:
        """The table of queries, (1 + most, FIELDS) int32, and then that of keys.

        The first element of each says how many tiles follow.
        """
        starts_q, starts_k = given.cu_seqlens_q, given.cu_seqlens_k
        assert starts_q is not None
        assert starts_k is not None
        table = starts_q.new_empty((2 + sum(self.most)) * FIELDS.value)
        self.launch(
            {
                "starts_q_ptr": starts_q.data_ptr(),
                "starts_k_ptr": starts_k.data_ptr(),
                "tiles_ptr": table.data_ptr(),
            }
        )
        return table
