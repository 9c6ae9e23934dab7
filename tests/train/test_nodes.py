"""Nodes with different numbers of ranks in a recipe: `mesh.nodes`."""

import pytest

from detonation.cluster.init import LaunchPosition
from detonation.train.recipe.resolve import fill_mesh, read_layers


def test_a_run_over_unequal_nodes_stays_equal_and_goes_on_over_others(train):
    ends = train("run", "mesh.nodes=[2,1]", "train.steps=4", "train.checkpoint_every=2")
    assert len(ends) == 3 and {end["fingerprint"] for end in ends} == {ends[0]["fingerprint"]}
    assert all(end["replicas_equal"] and end["shards"] == [2, 1] for end in ends)
    # a message is cut into as many as the larger node sends, each with a header
    alike = train("alike", "mesh.shards=2", "train.steps=4")[0]
    assert ends[0]["bytes_sent_per_step"] == alike["bytes_sent_per_step"]
    for sets in (["mesh.replicas=3"], ["mesh.nodes=[1,2]"]):
        again = train("run", *sets, f"train.steps={4 + 2 * len(sets[0])}", resume=True)
        assert all(end["replicas_equal"] for end in again)


def test_the_loss_of_a_rank_is_told_with_its_replica(train):
    with pytest.raises(Exception, match=r"on replica [01] \(shard 0\)"):
        train(
            "run", "mesh.nodes=[1,2]", "optimizer.name=SGD", "optimizer.lr=1e30", "scheme.name=full"
        )


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["mesh.nodes=[2,0]"], "mesh.nodes is [2, 0], but must be at least 1 each"),
        (["mesh.nodes=[2,1.5]"], "mesh.nodes is [2, 1.5], but must be a list of whole numbers"),
        (
            ["mesh.nodes=[2,1]", "mesh.link=1gbit"],
            "must be left out with elastic, link or shard_nodes",
        ),
        (
            ["mesh.nodes=[2,1]", "mesh.elastic=true"],
            "must be left out with elastic, link or shard_nodes",
        ),
        (
            ["mesh.nodes=[2,1]", "scheme.name=auto"],
            "must be left out with several levels or scheme auto",
        ),
    ],
)
def test_what_unequal_nodes_cannot_do_is_refused_before_any_process_starts(tiny, sets, message):
    with pytest.raises(ValueError) as error:
        tiny(*sets)
    assert message in str(error.value)


def test_the_world_of_a_launcher_has_the_ranks_that_the_recipe_names(tmp_path):
    place = LaunchPosition(0, 3, 0, 2, nodes=2)
    assert fill_mesh({"nodes": [2, 1]}, place) == {"nodes": [2, 1]}
    with pytest.raises(
        ValueError, match=r"give the number of ranks of each node: --set mesh.nodes=\[4,2\]"
    ):
        fill_mesh({}, place)
    with pytest.raises(
        ValueError, match=r"mesh.nodes is \[2, 2\], but must be 3 ranks, which were started"
    ):
        fill_mesh({"nodes": [2, 2]}, place)
    recipe = tmp_path / "own.toml"
    recipe.write_text("[mesh]\nnodes = [2, 1]\n")
    assert read_layers(recipe, [], place, mesh={}).overrides["mesh"]["nodes"] == [2, 1]
    with pytest.raises(ValueError, match="left out with --shards"):
        read_layers(recipe, [], place, mesh={"shards": 3})
