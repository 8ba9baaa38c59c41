"""Which rank runs which stage."""

import pytest

from pipeline import schedules
from pipeline.runtime.connection import peer_pairs
from pipeline.runtime.places import Place, place_stages


def test_one_node_runs_stages_in_the_order_of_ranks():
    mapping = place_stages(schedules.bpipe(4, 8), [0] * 8)
    assert mapping.ranks == ((0, 1, 2, 3), (4, 5, 6, 7))
    place = Place(6, mapping)
    assert (place.stage, place.replica, place.num_stages, place.num_replicas) == (2, 1, 4, 2)
    assert [place.peer(stage) for stage in range(4)] == [4, 5, 6, 7]
    assert [place.stage_of(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        ([0, 0, 1, 1], 2),
        ([0, 1, 0, 1], 2),  # ranks dealt out by turns
        ([0, 0, 0, 1], 1),
        ([0, 0, 0, 0, 1, 1, 1, 1], 4),
        ([0, 0, 1, 1, 2, 2, 3, 3], 4),
        ([0, 1, 2, 3], 0),
    ],
)
def test_partners_share_a_node_within_their_replica(nodes, pairs):
    mapping = place_stages(schedules.bpipe(4, 8), nodes)
    assert sorted(rank for ranks in mapping.ranks for rank in ranks) == list(range(len(nodes)))
    for replica, ranks in enumerate(mapping.ranks):
        assert {rank // 4 for rank in ranks} == {replica}
        assert ranks[0] == 4 * replica, "rank 0 has the first stage"
    total = 2 * len(mapping.ranks)
    assert total - len(mapping.split_pairs) == pairs
    assert f"{pairs} of {total} pairs on one node" in str(mapping)


def test_schedules_that_move_no_stash_keep_neighbours_together():
    mapping = place_stages(schedules.one_f_one_b(4, 8), [0, 0, 1, 1])
    assert mapping.ranks == ((0, 1, 2, 3),)
    assert mapping.boundaries_between_nodes == 1


def test_ranks_that_talk_to_each_other_follow_the_mapping():
    schedule = schedules.bpipe(4, 8)
    mapping = place_stages(schedule, [0, 0, 1, 1])
    of = mapping.ranks[0]
    wanted = {(of[0], of[1]), (of[1], of[2]), (of[2], of[3]), (of[0], of[3])}
    assert peer_pairs(schedule, mapping.ranks) == {(min(p), max(p)) for p in wanted}
