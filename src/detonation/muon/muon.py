"""Muon: matrices move in the nearest orthogonal direction; AdamW moves all other parameters."""

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from detonation.choices import did_you_mean, require_range, unknown
from detonation.core.agreement import StepTest, register_step_test
from detonation.core.flat.tensors import local, reshard_gradients
from detonation.core.optim import evaluated
from detonation.muon import matrices

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_SECOND_MOMENT = "second_momentum_buffer"
"""The key of NorMuon's state: the mean square of each row of directions, `[rows]` fp32."""
_MISSPELT = 0.85
"""A key of a group counts as misspelt if its likeness to a valid key is at least this number. The
likeness of `max_momentum` and `momentum` is 0.8.
"""
_SAFETY = 1.01
"""The factor by which rounding may enlarge a singular value in the method Polar Express."""
COEFFICIENTS = {
    "jordan": (1.0, ((3.4445, -4.7750, 2.0315),) * 5),
    "polar_express": (
        _SAFETY,
        tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
    ),
}
"""For each name: the norm's factor, and the coefficients of x, x^3 and x^5 in each iteration."""


class Muon(Optimizer):
    """`m = momentum * m + (1 - momentum) * gradient`; a matrix moves by `lr * 0.2 * sqrt(longer
    side) * orthogonal(m)`.

    The momentum is Nesterov's. With the factor 0.2 * sqrt(longer side), the same lr suits matrices
    and all other parameters. AdamW moves parameters that are not matrices, and all parameters of
    groups with `orthogonal=False` (use it for embeddings and the output layer).

    The orthogonal direction depends on the whole momentum of a matrix. So each step gathers the
    momentum of every sharded matrix to one rank of the node. This rank computes the direction, and
    sends each rank its shard of the direction. If a matrix is sharded over several axes, every rank
    computes the direction. With any number of shards, the result is bitwise equal to a step on the
    whole matrix.
    `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` makes the same steps on whole matrices,
    but multiplies in bf16 on CPUs, too. On shards, `torch.optim.Muon` of torch 2.13 fails for a
    matrix with fewer rows than shards, and starts 11 to 16 collectives per matrix of 8 shards.

    Args:
        params: Parameters or groups of them, as in torch; a group may set `orthogonal`, and each
            of the arguments below.
        lr: At least 0.
        momentum: From 0 to below 1.
        weight_decay: Decoupled, at least 0.
        betas: The decay of AdamW's two moments, each from 0 to below 1.
        eps: Added to denominators: AdamW's, and that of `muon_beta2`.
        coefficients: Polynomials of the five iterations towards an orthogonal matrix: "jordan" uses
            the same polynomial in each iteration, "polar_express" the best one for each iteration.
        muon_beta2: The decay of NorMuon's second moment, from 0 to below 1; NorMuon has 0.95. The
            second moment is the mean square of each row of directions. Each row is divided by the
            root of its second moment, and the direction is then scaled to the norm of an orthogonal
            matrix. None divides no row.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Muon([weight], lr=1.0)
        >>> weight.grad = torch.tensor([[4.0, 0.0], [0.0, 0.5]])
        >>> optimizer.step()
        >>> weight.mul(10).round().tolist()
        [[-2.0, 0.0], [0.0, -2.0]]

    Reference: Jordan et al., Muon, 2024 (kellerjordan.github.io/posts/muon); the scale of Liu et
    al., arXiv 2502.16982; Polar Express, arXiv 2505.16932; NorMuon, arXiv 2510.05491.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        coefficients: str = "jordan",
        muon_beta2: float | None = None,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": tuple(betas) if isinstance(betas, list) else betas,
            "eps": eps,
            "coefficients": coefficients,
            "muon_beta2": muon_beta2,
        }
        super().__init__(params, {**settings, "orthogonal": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch. Raises `ValueError` if a value is out of range, a key is
        misspelt, or a matrix is complex.
        """
        _refuse_misspelt(param_group, self.defaults)
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.is_complex() and _is_orthogonal(p, self.param_groups[-1]):
                self.param_groups.pop()
                raise ValueError(
                    f"a matrix {tuple(p.shape)} is {p.dtype}, must be real: put it into a group"
                    " with orthogonal=False"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state. Options that older versions did not save get the values that those
        versions used. Raises `ValueError` for the state of another optimizer, such as
        `torch.optim.Muon`.
        """
        for group in state.get("param_groups", ()):
            if missing := {"betas", "orthogonal"} - group.keys():
                lacks = " and ".join(sorted(missing))
                raise ValueError(
                    f"another optimizer saved the state: its groups lack {lacks}; load the state of"
                    " a Muon of this library"
                )
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("coefficients", "jordan")
            group.setdefault("muon_beta2", None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`, as in torch. NorMuon's second moments stay fp32,
        whatever the dtype of the parameter.
        """
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {}).get(_SECOND_MOMENT)
            if saved is not None:  # torch rounded the loaded moment to the parameter's dtype
                moment = saved.to(local(parameter).device, torch.float32, copy=True)
                self.state[parameter][_SECOND_MOMENT] = moment

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves all parameters that have a gradient; returns the value of `closure`."""
        loss = evaluated(closure)
        steps = []
        for group in self.param_groups:
            _check_choices(group)
            others = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                if _is_orthogonal(p, group):
                    steps.append(_OrthogonalStep(p, group, self.state[p]))
                else:
                    others.append(p)
            self._adamw_step(others, group)
        matrices.take(steps)
        return loss

    def _adamw_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        reshard_gradients(parameters)
        for p in parameters:
            if "exp_avg" not in self.state[p]:  # `p` may have been moved as a matrix until now
                step = torch.zeros((), dtype=torch.float32, device="cpu")
                self.state[p].update(
                    step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                )
        states = [self.state[p] for p in parameters]
        adamw(
            [local(p) for p in parameters],
            [local(p.grad) for p in parameters if p.grad is not None],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


# the self-test of Muon steps a matrix of 64 rows, because it would be slow with 512 rows
register_step_test(Muon, StepTest(rows=64, is_elementwise=False))


def _is_orthogonal(parameter: Tensor, group: dict[str, Any]) -> bool:
    return parameter.ndim == 2 and bool(group["orthogonal"])


def _refuse_misspelt(group: dict[str, Any], valid: dict[str, Any]) -> None:
    """Raises `ValueError` for a key of `group` that is almost equal to one of the `valid` keys.

    Other keys pass, because schedulers and other tools write keys of their own, such as
    `initial_lr`, `max_momentum` and `name`.
    """
    for key in group.keys() - valid.keys():
        if did_you_mean(key, [*valid], _MISSPELT):
            raise unknown("key of a group of Muon", key, valid)


def _check(settings: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "eps"):
        require_range(name, settings[name])
    _check_choices(settings)


def _check_choices(settings: dict[str, Any]) -> None:
    """Raises `ValueError` for a setting that no step can use. Every step calls this function,
    because a training loop may write into `param_groups`. lr is not checked, because a schedule
    that ends at 0 may round lr to slightly below 0.
    """
    require_range("momentum", settings["momentum"], below=1)
    betas = settings["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r}, must be two numbers from 0 to below 1")
    for beta in betas:
        require_range("a number of betas", beta, below=1)
    if settings["muon_beta2"] is not None:
        require_range("muon_beta2", settings["muon_beta2"], below=1)
        if not settings["eps"]:
            raise ValueError(
                "eps is 0, must be above 0 with muon_beta2, because a row may be 0: its norm plus"
                " eps divides the row"
            )
    if type(settings["orthogonal"]) is not bool:
        raise ValueError(f"orthogonal is {settings['orthogonal']!r}, must be True or False")
    coefficients = str(settings["coefficients"])
    if coefficients not in COEFFICIENTS:
        raise unknown("coefficients", coefficients, COEFFICIENTS)


class _OrthogonalStep:
    """The step of Muon on one matrix; see `matrices.MatrixStep`."""

    def __init__(self, matrix: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.matrix = matrix
        # accelerators compute products in bf16, so shards are sent in bf16
        self.dtype = torch.bfloat16
        if local(matrix).device.type == "cpu":
            self.dtype = matrix.dtype
        self.noted = 0
        if group["muon_beta2"] is not None:
            self.noted = matrix.shape[0]
        self._group = group
        self._state = state

    def before(self) -> Tensor:
        """Updates the momentum, and returns it with Nesterov's correction."""
        gradient = self.matrix.grad
        assert gradient is not None
        if "momentum_buffer" not in self._state:
            self._state["momentum_buffer"] = torch.zeros_like(self.matrix)
        decay = self._group["momentum"]
        momentum = self._state["momentum_buffer"].lerp_(gradient, 1 - decay)
        direction = gradient.lerp(momentum, decay)
        if isinstance(direction, DTensor) and isinstance(momentum, DTensor):
            direction = direction.redistribute(placements=momentum.placements)
        return direction.to(self.dtype)

    def whole(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the orthogonal direction and, for NorMuon, the mean of the squares of each of its
        rows.
        """
        direction = _newton_schulz(given, self._group["coefficients"])
        if not self.noted:
            return direction, direction.new_empty(0, dtype=torch.float32)
        columns = direction.shape[1]
        squares = direction.float().square()
        # a matrix product adds the squares, because in `SingleRounding` it is an exact sum
        means = (squares @ squares.new_ones(columns, 1)).div_(columns)
        return direction, means.view(-1)

    def divisors(self, notes: Tensor) -> Tensor:
        """Returns the root of NorMuon's second moment, by which each row is divided. The root is
        scaled so that the direction keeps the norm of an orthogonal direction.
        """
        if _SECOND_MOMENT not in self._state:
            self._state[_SECOND_MOMENT] = torch.zeros_like(notes)
        moment: Tensor = self._state[_SECOND_MOMENT]
        moment.lerp_(notes, 1 - self._group["muon_beta2"])
        root = moment.sqrt().add_(self._group["eps"])
        norm = (notes.sqrt() / root).norm() * math.sqrt(self.matrix.shape[1])
        scale = norm / math.sqrt(min(self.matrix.shape))
        return root.mul_(scale.clamp(min=1e-7)).view(-1, 1)

    def after(self, result: Tensor) -> None:
        """Decays the weights, and moves them by `result`."""
        lr = float(self._group["lr"])
        weights = local(self.matrix)
        weights.mul_(1 - lr * self._group["weight_decay"])
        weights.add_(result, alpha=-lr * 0.2 * math.sqrt(max(self.matrix.shape)))


def _newton_schulz(matrix: Tensor, coefficients: str = "jordan") -> Tensor:
    """Approximates U V^T for the matrix U S V^T by five iterations of a quintic polynomial, which
    bring the singular values close to 1.

    Computes in bf16 on accelerators, and in fp32 on every CPU. CPUs without bf16 instructions
    multiply 16 to 35 times more slowly in bf16, and all CPUs must compute the same direction.
    """
    dtype = torch.bfloat16
    if matrix.device.type == "cpu":
        dtype = torch.float32
    margin, polynomials = COEFFICIENTS[coefficients]
    x: Tensor = matrix.to(dtype).contiguous()  # with other strides, products round differently
    x = x / (x.norm() * margin).clamp(min=1e-7)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    for first, third, fifth in polynomials:
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
        x = torch.addmm(x, polynomial, x, beta=first)
    if is_tall:
        # Shards from other ranks are contiguous, so this result must be contiguous, too.
        # With other strides, sums in 16 bits would differ.
        x = x.T.contiguous()
    return x.to(matrix.dtype)
