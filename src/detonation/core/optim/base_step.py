"""The step of the base optimizer. All replicas make this step together, or no replica makes it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from detonation.core.flat.tensors import local, padding_row
from detonation.core.optim.wrapper import names_of
from detonation.plugins import plugin


class Clipping(Protocol):
    """A function that scales the gradients before a step, and stores their norm."""

    norm: Tensor | None

    def __call__(self) -> None: ...


def unheard(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `step`, the step method of an optimizer class. Each call runs with gradients disabled,
    and then calls the hooks that are registered to run after a step.

    torch's own wrapper costs 30 more Python calls per step, because it also calls the profiler and
    the hooks before steps. A step uses torch's wrapper only while a profiler runs, or if hooks
    before steps are registered.
    """
    heard = Optimizer.profile_hook_step(torch.no_grad()(step))

    @wraps(step)
    def stepped(self: Optimizer, closure: Any = None) -> Any:
        before = _global_optimizer_pre_hooks or self._optimizer_step_pre_hooks
        if before or profiler._is_profiler_enabled:
            return heard(self, closure)
        tracked = torch.is_grad_enabled()
        if tracked:
            torch._C._set_grad_enabled(False)
        try:
            out = step(self, closure)
        finally:
            if tracked:
                torch._C._set_grad_enabled(True)
        for hooks in (self._optimizer_step_post_hooks, _global_optimizer_post_hooks):
            for hook in hooks.values():
                hook(self, (self, closure), {})
        return out

    stepped.hooked = True  # type: ignore[attr-defined]  # so torch does not wrap it again
    return stepped


class BaseStep:
    """Calls `step` of a base optimizer, on the agreed gradients. Raises an error if other code
    calls `step` of the base optimizer.

    Attributes:
        clip: Called before each step, if set; see `Clip`.
        overflow: What a GradScaler found: nonzero if gradients of this replica overflowed. The step
            is then skipped. None without a GradScaler, and as soon as an agreed update has replaced
            the gradients.
        lost: True if a GradScaler found that gradients of this replica overflowed. It stays True
            when an agreed update replaces the gradients.
        rounding: Context manager in which each step runs; None if torch's own steps are used.
        look: Function that is called when a step has moved the weights, before hooks of other code
            run; None without such a function.

    Args:
        optimizer: The base optimizer. It gets a hook that checks each of its steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.clip: Clipping | None = None
        self.overflow: Tensor | None = None
        self.lost = False
        self.rounding: AbstractContextManager[object] | None = None
        self.look: Callable[[], object] | None = None
        self._held: dict[int, tuple[Tensor, int]] = {}
        self._hook: Callable[[], object] | None = None  # removes the hook that `hold` added
        self._lookout = _lookout_of(optimizer)
        self._lookout.users.add(self)

    def __call__(self, clips: bool = True) -> None:
        """Clips the gradients, if `clips` is True and `clip` is set, and steps the optimizer. Does
        nothing if a GradScaler found an overflow (`overflow`).
        """
        if self.overflow is not None and bool(self.overflow):
            return
        if self.clip and clips:
            self.clip()
        self._lookout.stepping = self
        try:
            if self.rounding is None:
                self.optimizer.step()
            else:
                with self.rounding:
                    self.optimizer.step()
        finally:
            self._lookout.stepping = None

    @property
    def overflows(self) -> bool:
        """True if a GradScaler found an overflow in the gradients. Waits for the device."""
        return self.overflow is not None and bool(self.overflow)

    @property
    def norm(self) -> Tensor | None:
        """The gradient norm that the last step with clipping computed; None without clipping."""
        if self.clip is None:
            return None
        return self.clip.norm

    @property
    def rounds_singly(self) -> bool:
        """True if `round_singly` is on: steps then give the same bits on all kinds of processors,
        but take longer.
        """
        return self.rounding is not None

    def round_singly(self, on: bool = True) -> None:
        """Chooses how later steps round. If `on` is True, every operation of a step is rounded
        separately, so that all processors get the same bits. Otherwise torch's own steps are used.
        """
        self.rounding = None
        if on:
            self.rounding = plugin("gates", "single rounding")()

    def hold(self, parameters: Iterable[Tensor]) -> None:
        """Registers the padding rows of the embeddings among `parameters`. From now on, the
        gradients of these rows are set to zero before each step, so that updates do not move the
        rows.
        """
        found = {id(p): (p, row) for p in parameters if (row := padding_row(p)) is not None}
        if found and self._hook is None:
            self._hook = _hook_before(self.optimizer, self)
        self._held |= found

    def release(self, parameter: Tensor) -> None:
        """Lets later steps move all rows of `parameter`, including its padding row."""
        self._held.pop(id(parameter), None)
        if self._hook is not None and not self._held:
            self._hook()
            self._hook = None

    def zero_held_rows(self) -> None:
        """Sets the gradients of the padding rows that `hold` has registered to zero."""
        for parameter, row in self._held.values():
            if parameter.grad is not None:
                local(parameter.grad)[row].zero_()


def _hook_before(optimizer: Optimizer, step: BaseStep) -> Callable[[], object]:
    """Registers a hook that calls `step.zero_held_rows` before each step of `optimizer`. Returns a
    function that removes the hook.

    The hook holds only a weak reference to `step`. When `step` is freed, the hook is removed.
    """
    reference = ref(step)

    def hold(*_: object) -> None:
        if (alive := reference()) is not None:
            alive.zero_held_rows()

    return finalize(step, optimizer.register_step_pre_hook(hold).remove)


def hooks_of(optimizer: Optimizer) -> list[str]:
    """Returns the names of the hooks that run before or after each step of `optimizer` and were
    registered by code outside of this library.
    """
    return [*hooks_before(optimizer), *hooks_after(optimizer)]


def hooks_before(optimizer: Optimizer) -> list[str]:
    """Returns the names of the hooks that other code registered to run before each step."""
    own = optimizer._optimizer_step_pre_hooks.values()
    return _of_others([*_global_optimizer_pre_hooks.values(), *own])


def hooks_after(optimizer: Optimizer) -> list[str]:
    """Returns the names of the hooks that other code registered to run after each step."""
    own = optimizer._optimizer_step_post_hooks.values()
    return _of_others([*own, *_global_optimizer_post_hooks.values()])


def _of_others(hooks: Iterable[Callable[..., object]]) -> list[str]:
    others = [hook for hook in hooks if not str(hook.__module__).startswith("detonation.")]
    return names_of(others)


class _Lookout:
    """A hook that runs after each step of an optimizer, before other hooks. It raises an error if
    the step was not made by a `BaseStep`, because such a step changes only this replica.

    This check does not run before the step. A hook before the step may read the gradients, so
    `Update.apply` would have to write the update into them.

    Attributes:
        stepping: The `BaseStep` that takes a step now.
    """

    def __init__(self) -> None:
        self.users: WeakSet[BaseStep] = WeakSet()
        self.stepping: BaseStep | None = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # a step with lr 0 is allowed: torch's state-dict helpers make such a step to create state
        stepping = self.stepping
        if stepping is not None:
            if stepping.look:
                stepping.look()
            return
        moves = any(group.get("lr", 1) != 0 for group in optimizer.param_groups)
        if self.users and moves:
            raise RuntimeError(
                f"step() of the inner {type(optimizer).__name__} was called, which moves this"
                " replica alone: call step() of the optimizer that detonation.replicate returned"
            )


def _lookout_of(optimizer: Optimizer) -> _Lookout:
    """Returns the `_Lookout` hook of `optimizer`. The first call registers the hook."""
    for hook in optimizer._optimizer_step_post_hooks.values():
        if isinstance(hook, _Lookout):
            return hook
    lookout = _Lookout()
    handle = optimizer.register_step_post_hook(lookout)
    hooks: Any = optimizer._optimizer_step_post_hooks  # torch annotates an OrderedDict as a dict
    hooks.move_to_end(handle.id, last=False)
    return lookout
