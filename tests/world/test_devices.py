"""Each rank takes its GPU, under every launcher, and none trains on the CPU beside a GPU unless it is told to."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import detonation as dt
import worlds
from commands import free_port
from detonation.cluster import devices
from detonation.cluster.devices import GPUs, choose_device, require_gpu_each, require_own_devices
from detonation.cluster.init import gpus_for, launch_position
from detonation.core.agreement.self_tests import selftest_conditions
from detonation.train.recipe.resolve import fill_mesh

TORCHRUN = {
    "RANK": "13",
    "WORLD_SIZE": "64",
    "LOCAL_RANK": "5",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "n1",
}
SRUN = {
    "SLURM_PROCID": "13", "SLURM_NTASKS": "64", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "5", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x8)", "SLURM_STEP_NODELIST": "n[1-8]", "SLURM_JOB_ID": "77",
}  # fmt: skip
KUBEFLOW = {"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "13", "OMPI_COMM_WORLD_SIZE": "64"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
MPICH = {"PMI_RANK": "13", "PMI_SIZE": "64", "MPI_LOCALRANKID": "5", "MPI_LOCALNRANKS": "8"}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
UNDER_SRUN = {
    **SRUN,
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
}  # mpirun's daemon
PLAIN, NONE = GPUs(0, False), GPUs(0, True)
DRIVER, NO_CUDA = GPUs(0, True, "/dev/nvidia0"), GPUs(0, False, "/dev/nvidia0")

TAKEN = [
    ("torchrun, all visible", TORCHRUN, GPUs(8, True), "cuda:5"),
    ("torchrun --virtual-local-rank", {**TORCHRUN, "LOCAL_RANK": "0"}, GPUs(1, True), "cuda:0"),
    (
        "torchrun, more GPUs than ranks",
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "6"},
        GPUs(8, True),
        "cuda:5",
    ),
    ("srun, all visible", SRUN, GPUs(8, True), "cuda:5"),
    ("srun --gpus-per-task=1", SRUN, GPUs(1, True), "cuda:0"),
    ("Kubeflow, one GPU per pod", KUBEFLOW, GPUs(1, True), "cuda:0"),
    ("by hand on one machine", {**KUBEFLOW, "MASTER_ADDR": "127.0.0.1"}, GPUs(16, True), "cuda:3"),
    ("Open MPI, all visible", OPEN_MPI, GPUs(8, True), "cuda:5"),
    ("MPICH and Intel MPI", MPICH, GPUs(8, True), "cuda:5"),
    ("MVAPICH", MVAPICH, GPUs(8, True), "cuda:5"),
    ("Open MPI in a SLURM job", {**UNDER_SRUN, **OPEN_MPI}, GPUs(8, True), "cuda:5"),
    ("MPICH in a SLURM job", {**UNDER_SRUN, **MPICH}, GPUs(8, True), "cuda:5"),
    ("srun --mpi=pmi2", {**SRUN, "PMI_RANK": "13", "PMI_SIZE": "64"}, GPUs(8, True), "cuda:5"),
    ("alone", {}, GPUs(2, True), "cuda:0"),
    ("no GPU", TORCHRUN, PLAIN, "cpu"),
    ("no GPU, torch with CUDA", SRUN, NONE, "cpu"),
    ("hidden by the user", {**TORCHRUN, "CUDA_VISIBLE_DEVICES": ""}, DRIVER, "cpu"),
    (
        "hidden by the user, -1",
        {**SRUN, "CUDA_VISIBLE_DEVICES": "-1", "SLURM_GPUS_ON_NODE": "8"},
        NO_CUDA,
        "cpu",
    ),
]
REFUSED = [
    (
        "too few for the local ranks",
        TORCHRUN,
        GPUs(4, True),
        "4 GPU.s. are visible for 8 ranks on this machine",
    ),
    ("local rank unknown", KUBEFLOW, GPUs(8, True), "set LOCAL_RANK and LOCAL_WORLD_SIZE"),
    (
        "local rank too high",
        {**KUBEFLOW, "LOCAL_RANK": "9"},
        GPUs(8, True),
        "LOCAL_RANK is 9, but 8 GPUs",
    ),
    (
        "torch without CUDA",
        TORCHRUN,
        NO_CUDA,
        "/dev/nvidia0 shows a GPU, but torch .* is built without CUDA",
    ),
    ("driver out of order", {}, DRIVER, "/dev/nvidia0 shows a GPU, but torch cannot use it"),
    (
        "the variable is set",
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        NONE,
        "CUDA_VISIBLE_DEVICES=0,1 shows a GPU",
    ),
    (
        "SLURM gave GPUs to the job",
        {**SRUN, "SLURM_GPUS_ON_NODE": "8"},
        NONE,
        "SLURM_GPUS_ON_NODE=8 shows a GPU",
    ),
    (
        "SLURM gave none",
        {**SRUN, "CUDA_VISIBLE_DEVICES": "NoDevFiles"},
        DRIVER,
        "ask SLURM for a GPU, such as with --gpus-per-task",
    ),
]


@pytest.mark.parametrize(
    ("env", "gpus", "device"), [row[1:] for row in TAKEN], ids=[row[0] for row in TAKEN]
)
def test_each_rank_takes_its_gpu(env, gpus, device):
    assert choose_device(env, gpus, launch_position(env)) == torch.device(device)
    assert choose_device(env, gpus, launch_position(env), "cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("env", "gpus", "error"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_gpu_that_a_rank_cannot_take_is_an_error_that_says_what_to_set(env, gpus, error):
    with pytest.raises(ValueError, match=error):
        choose_device(env, gpus, launch_position(env))
    assert choose_device(env, gpus, launch_position(env), "cpu") == torch.device("cpu")


def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(
        ValueError, match=r"device is 'cuda', but torch .* sees no GPU: /dev/nvidia0 shows a GPU"
    ):
        choose_device({}, DRIVER, None, "cuda")
    with pytest.raises(ValueError, match="device is 'tpu'"):
        choose_device({}, PLAIN, None, "tpu")


def test_ranks_that_share_a_gpu_or_differ_in_having_one_are_named():
    require_own_devices(["GPU a of n1", "GPU b of n1", "GPU c of n2"])
    require_own_devices(["the CPU of n1", "the CPU of n1"])
    with pytest.raises(
        ValueError,
        match=r"ranks 0 and 2 share GPU a of n1: give each rank its own GPU \(srun --gpus-per-task",
    ):
        require_own_devices(["GPU a of n1", "GPU b of n1", "GPU a of n1"])
    with pytest.raises(ValueError, match="rank 1 is on the CPU of n2, rank 0 on GPU a of n1"):
        require_own_devices(["GPU a of n1", "the CPU of n2"])


def test_a_world_of_this_machine_is_never_on_the_cpu_because_a_gpu_is_missing(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("detonation.cluster.init.look_for_gpus", lambda: GPUs(1, True))
    assert gpus_for(1)
    with pytest.raises(
        ValueError, match=r'1 GPU.s. are visible for 4 ranks.*set CUDA_VISIBLE_DEVICES to ""'
    ):
        gpus_for(4)


# A job of four tasks as its shells see it.
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "4",
    "SLURM_NNODES": "1",
    "SLURM_NODELIST": "n1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
ONE_TASK = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
SHELL = {**JOB, **ONE_TASK, "SLURM_STEP_ID": "4294967290"}  # of salloc
FOUR_TASKS = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_PROCID": "3"}
TWO_OF_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
TWO_OF_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
TWO_OF_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TWO_OF_HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2"}

LAUNCHED = [
    ("the shell of salloc", SHELL, None),
    ("the shell of a batch script", {**JOB, "SLURM_STEP_ID": "4294967291"}, None),
    ("a batch script without a step", JOB, None),
    ("a shell on the node, by pam_slurm", {**SHELL, "SLURM_STEP_ID": "4294967292"}, None),
    (
        "the shell of srun --pty",
        {**JOB, **ONE_TASK, "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "4"},
        None,
    ),
    ("srun -n 1 in a job of four", {**JOB, **ONE_TASK, "SLURM_STEP_ID": "0"}, (0, 1, 1)),
    ("srun in the shell of salloc", {**SHELL, **FOUR_TASKS, "SLURM_STEP_ID": "1"}, (3, 4, 4)),
    ("srun --overlap -n 4", {**JOB, **FOUR_TASKS, "SLURM_STEP_ID": "2"}, (3, 4, 4)),
    (
        "srun, the count of the job larger than that of the step",
        {**JOB, **FOUR_TASKS, "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"},
        (3, 4, 4),
    ),
    ("an old SLURM without the step's count", SRUN, (13, 64, 8)),
    ("mpirun in the shell of salloc", {**SHELL, **TWO_OF_MPI}, (1, 2, 2)),
    ("torchrun in the shell of salloc", {**SHELL, **TWO_OF_TORCHRUN}, (1, 2, 2)),
    ("hydra in the shell of salloc", {**SHELL, **TWO_OF_HYDRA}, (1, 2, None)),
    ("torchrun under srun", {**SRUN, **TWO_OF_TORCHRUN}, (1, 2, 2)),
    ("nobody", {}, None),
]


@pytest.mark.parametrize(("name", "env", "expected"), LAUNCHED)
def test_the_step_counts_and_a_shell_is_one_process(name, env, expected):
    position = launch_position(env)
    found = position and (position.rank, position.world_size, position.local_world_size)
    assert found == expected


def test_the_places_of_mpi_ranks():
    position = launch_position(OPEN_MPI)
    assert (position.rank, position.world_size, position.local_rank, position.local_world_size) == (
        13,
        64,
        5,
        8,
    )
    uneven = launch_position({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "2"})
    assert uneven.local_world_size == 1
    unknown = launch_position(KUBEFLOW)
    assert (unknown.local_rank, unknown.local_world_size) == (None, None)
    with pytest.raises(ValueError, match="how many ranks a machine has: give --shards"):
        fill_mesh({}, unknown)
    assert fill_mesh({"shards": 1}, unknown) == {"replicas": 16, "shards": 1}
    for name, value in (("replicas", 0), ("shards", 0), ("replicas", "two")):
        with pytest.raises(
            ValueError, match=rf"mesh\.{name} is .*, but must be a number of at least 1"
        ):
            fill_mesh({name: value}, unknown)


@pytest.fixture
def environment():
    """The environment, which joining a world changes, as it was before."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("environment")
def test_the_mesh_refuses_what_the_machine_lacks(monkeypatch):
    monkeypatch.setattr("detonation.cluster.init.look_for_gpus", lambda: DRIVER)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match="this rank would train on the CPU although there is a GPU"
    ):
        dt.init_mesh(1, 1)
    with pytest.raises(ValueError, match="device is 'cuda', but torch"):
        dt.init_mesh(1, 1, "cuda")
    assert not dist.is_initialized()
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="MASTER_PORT not set"):
        dt.init_mesh(1, 1, "cpu")
    monkeypatch.setenv("MASTER_PORT", env["MASTER_PORT"])
    assert dt.init_mesh(1, 1, "cpu").device_type == "cpu"
    assert os.environ["LOCAL_RANK"] == "0"
    dt.leave()


def test_what_is_looked_for_is_there(monkeypatch):
    found = devices.look_for_gpus()
    assert found.usable == 0 and found.supported == torch.backends.cuda.is_built()
    require_gpu_each(found, 8)


def test_a_group_that_does_not_carry_the_models_tensors_is_named():
    dist.init_process_group(
        "cuda:gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # as "nccl", without a GPU
    try:
        mesh = DeviceMesh("cpu", [0], mesh_dim_names=("replicate",))
        error = "the model is on cpu, but the process group carries no such tensors .* with 'cpu:gloo,cuda:nccl'"
        with pytest.raises(ValueError, match=error):
            dt.same_weights(torch.nn.Linear(2, 2), mesh)
        model = torch.nn.Linear(2, 2)
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters(), lr=0.1), model, mesh, dt.demo(topk=1, chunk=2)
        )
        with pytest.raises(ValueError, match=error):
            optimizer.set_up()
    finally:
        dist.destroy_process_group()


def test_a_mismatch_of_decoding_names_the_gpu_and_its_arithmetic(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert selftest_conditions(torch.device("cuda", 0)).endswith("gpu=NVIDIA H200, cuda=13.0")


def alone():
    """What `init_mesh` makes of a process without a launcher."""
    mesh = dt.init_mesh(device="cpu")
    shape = tuple(mesh.shape)
    dt.leave()
    return shape


def test_without_a_launcher_a_process_is_a_world_of_one_and_says_so(monkeypatch, caplog):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert alone() == (1, 1) and "this process trains alone" in caplog.text
    with pytest.raises(ValueError, match="2 replicas x 4 shards are 8 ranks, but the world has 1"):
        dt.init_mesh(2, 4, device="cpu")
    assert not torch.distributed.is_initialized(), "found before anybody is waited for"


def shapes(mesh, local):
    """The meshes of calls that leave something out, in a world whose nodes have `local` ranks."""
    found = []
    os.environ |= {
        "RANK": str(torch.distributed.get_rank()),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": str(local),
    }
    for asked in ({}, {"replicas": 4}, {"shards": 4}, {"replicas": 2, "shards": 2}):
        found.append(tuple(dt.init_mesh(**asked, device="cpu").shape))
    with pytest.raises(ValueError, match="3 replicas x 1 shards are 3 ranks, but the world has 4"):
        dt.init_mesh(replicas=3, device="cpu")
    return found


@pytest.mark.parametrize("local", [2, 4])
def test_what_is_left_out_of_a_mesh_comes_from_the_launcher(local):
    assert (
        worlds.run_alone(shapes, 2, 2, local) == [[(4 // local, local), (4, 1), (1, 4), (2, 2)]] * 4
    )
