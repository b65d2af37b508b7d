"""Layouts: every file of ours is read and placed; every mistake is one line that names file, table and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiinfer.errors import LayoutError
from mpiinfer.layout.grid import Grid, Place, make_grid
from mpiinfer.layout.spec import Layout, read_layout

LAYOUTS = sorted((Path(__file__).parents[2] / "layouts").glob("*.toml"))


@pytest.mark.parametrize("file", LAYOUTS, ids=lambda file: file.stem)
def test_our_layouts_are_read_and_placed(file: Path) -> None:
    layout = read_layout(file)
    grid = make_grid(layout, [0] * layout.num_ranks)
    assert sorted(grid.ranks) == list(range(layout.num_ranks))


def test_there_are_the_layouts_that_people_start_with() -> None:
    named = {file.stem for file in LAYOUTS}
    assert named >= {"solo", "tp2", "tp3", "tp4", "pp2", "pp3", "tp2_pp2", "tp3_pp2", "dp2_tp2"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[parallel]\ntensr = 2", ["[parallel]", "'tensr'", "did you mean 'tensor'"]),
        ("[paralel]\ntensor = 2", ["[paralel]", "did you mean 'parallel'"]),
        ("[parallel]\ntensor = '2'", ["[parallel] tensor", '"2"', "int"]),
        ("[parallel]\ntensor = true", ["[parallel] tensor", "int"]),
        ("[parallel]\ntensor = 0", ["[parallel] tensor = 0", "1 or more"]),
        ("[parallel]\npipeline = 2\n[pipeline]\nstages = [30]", ["[pipeline] stages = [30]", "pipeline = 2"]),
        ("[parallel]\npipeline = 2\n[pipeline]\nstages = [30, 0]", ["[pipeline] stages", "1 layer or more"]),
        ("[pipeline]\nslots = 0", ["[pipeline] slots = 0"]),
        ("[pipeline]\nslots = 'all'", ["[pipeline] slots"]),
        ("[place]\norder = 'random'", ["[place] order", "tensor-inner"]),
        ("[comm]\ndevice = 'tpu'", ["[comm] device", "nccl"]),
        ("[comm]\ndeadline_s = -1", ["[comm] deadline_s"]),
        ("[cache]\nmemory = '4XB'", ["[cache] memory", "4GiB"]),
        ("[cache]\nmemory = 1.5", ["[cache] memory", "fraction"]),
        ("parallel = 2", ["parallel", "table"]),
        ("[parallel", ["not valid TOML"]),
    ],
)
def test_mistakes_name_file_table_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "layout.toml"
    file.write_text(text)
    with pytest.raises(LayoutError) as caught:
        read_layout(file)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in [str(file), *words]), message


def test_missing_file() -> None:
    with pytest.raises(LayoutError, match=r"nowhere\.toml: cannot be read"):
        read_layout(Path("nowhere.toml"))


def test_memory_is_a_size_or_a_fraction() -> None:
    assert Layout(memory="4GiB").cache_bytes(0) == 4 << 30
    assert Layout(memory="1.5 MB").cache_bytes(0) == 1_500_000
    assert Layout(memory=0.25).cache_bytes(1000) == 250
    assert Layout().cache_bytes(1000) == 500


def test_digest_tells_layouts_apart() -> None:
    assert Layout(tensor=2).digest() == Layout(tensor=2).digest()
    assert Layout(tensor=2).digest() != Layout(pipeline=2).digest()


extents = st.integers(1, 4)


@given(tensor=extents, pipeline=extents, replicas=extents, data=st.data())
def test_every_rank_has_one_place(tensor: int, pipeline: int, replicas: int, data: st.DataObject) -> None:
    layout = Layout(tensor=tensor, pipeline=pipeline, replicas=replicas)
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=layout.num_ranks, max_size=layout.num_ranks))
    grid = make_grid(layout, nodes)
    places = [grid.place(rank) for rank in range(layout.num_ranks)]
    assert len(set(places)) == layout.num_ranks
    assert all(grid.rank_at(place) == rank for rank, place in enumerate(places))
    assert grid.place(0) == Place(0, 0, 0)
    members = [rank for replica in range(replicas) for rank in grid.members_of(replica)]
    assert sorted(members) == list(range(layout.num_ranks))


@given(tensor=st.integers(1, 4), groups=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data())
def test_shards_share_a_node_in_any_launch_order(tensor: int, groups: list[int], data: st.DataObject) -> None:
    """Node i has room for groups[i] tensor groups; the launcher numbers the ranks as it likes."""
    nodes = data.draw(st.permutations([node for node, count in enumerate(groups) for _ in range(count * tensor)]))
    layout = Layout(tensor=tensor, pipeline=sum(groups))
    grid = make_grid(layout, nodes)
    for stage in range(layout.pipeline):
        assert len({nodes[rank] for rank in grid.shards_of(0, stage)}) == 1


def test_launcher_order_takes_ranks_as_they_come() -> None:
    assert make_grid(Layout(tensor=2, pipeline=2, order="launcher"), [0, 1, 0, 1]).ranks == (0, 1, 2, 3)
    assert make_grid(Layout(tensor=2, pipeline=2), [0, 1, 0, 1]).ranks == (0, 2, 1, 3)


def test_domains_of_a_grid() -> None:
    grid = Grid(tensor=2, pipeline=2, replicas=2, ranks=tuple(range(8)))
    assert grid.shards_of(1, 0) == (4, 5)
    assert grid.stages_of(0, 1) == (1, 3)
    assert grid.members_of(1) == (4, 5, 6, 7)


def test_wrong_number_of_ranks_names_both_numbers() -> None:
    with pytest.raises(LayoutError, match=r"= 6 ranks, but the world has 4"):
        make_grid(Layout(tensor=3, pipeline=2), [0] * 4)
