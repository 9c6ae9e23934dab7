"""What the specifications share: rows, transforms, selections, and the exchange of messages."""

import math

import torch
from torch import Tensor

from specs.aggregations import aggregated, in_order
from specs.precisions import rounded


class Rows:
    """Parameters as one matrix.

    Each parameter is cut into rows of `chunk` coordinates; zeros fill its last row. With a `side` a
    matrix of at least side x side is cut into squares instead, which are its rows.
    """

    def __init__(self, weights: dict[str, Tensor], chunk: int, side: int = 0) -> None:
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.chunk = chunk
        self.side = side
        self.inside = self.of({name: torch.ones(shape) for name, shape in self.shapes.items()})

    def of(self, tensors: dict[str, Tensor]) -> Tensor:
        """The rows of `tensors`, one parameter after the other: `[rows, chunk]`."""
        return torch.cat([self._cut(tensors[name]) for name in self.shapes])

    def back(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `of`."""
        tensors = {}
        first = 0
        for name, shape in self.shapes.items():
            numbers = torch.arange(shape.numel()).view(shape)
            of_rows = self._cut(numbers + 1)  # the number of each coordinate from 1, 0 in padding
            part = matrix[first : first + len(of_rows)]
            line = torch.empty(shape.numel())
            line[of_rows[of_rows > 0] - 1] = part[of_rows > 0]
            tensors[name] = line.view(shape)
            first += len(of_rows)
        return tensors

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.inside)

    def _cut(self, tensor: Tensor) -> Tensor:
        side = self.side
        matrix = tensor.reshape(len(tensor), -1)
        if side and tensor.dim() > 1 and min(matrix.shape) >= side:
            down, across = -(-matrix.shape[0] // side), -(-matrix.shape[1] // side)
            missing = (0, across * side - matrix.shape[1], 0, down * side - matrix.shape[0])
            squares = torch.nn.functional.pad(matrix, missing).view(down, side, across, side)
            return squares.transpose(1, 2).reshape(-1, side * side)
        line = tensor.reshape(-1)
        return torch.nn.functional.pad(line, (0, -len(line) % self.chunk)).view(-1, self.chunk)


def waves(size: int) -> Tensor:
    """The basis of the DCT-II, one cosine per row."""
    number = torch.arange(size, dtype=torch.float64)
    angles = torch.outer(number, number + 0.5) * math.pi / size
    cosines = torch.cos(angles).round(decimals=14)  # cos(pi / 2) is 0
    cosines *= math.sqrt(2 / size)
    cosines[0] = math.sqrt(1 / size)
    return cosines.float()


def dct(rows: Tensor, side: int = 0) -> Tensor:
    """The coefficients of each row; with a `side` those of a square, along both sides.

    Its result travels, so that it may round as it likes. These are the library calls of the
    product, because the specification selects and sends the same bits.
    """
    if side:
        columns = waves(side).T.contiguous()
        return (columns.T @ rows.view(-1, side, side) @ columns).view_as(rows)
    product = torch.ops.mkldnn._linear_pointwise
    return product(waves(rows.shape[1]), rows.contiguous(), None, "none", [], "").T


def inverse_dct(values: Tensor, indices: Tensor, chunk: int, side: int = 0) -> Tensor:
    """The coordinates of coefficients: sums of cosines in the order of `indices`.

    A square is transformed along its lines first, then along its columns.
    """
    if not side:
        return fused_sum(waves(chunk), values, indices)
    squares = scattered(values, indices, chunk).view(-1, side, side)
    for _ in range(2):
        lines = squares.reshape(-1, side)
        squares = fused_sum(waves(side), lines, every_index(lines)).view_as(squares).mT
    return squares.reshape(-1, chunk)


def fused_sum(vectors: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """For each row the sum of weight * vector, one fused multiply-add in fp32 after the other.

    Here in fp64, where the product of two fp32 numbers is exact; the sum is rounded twice.
    """
    total = torch.zeros(len(weights), vectors.shape[1])
    for weight, index in zip(weights.T, indices.T, strict=True):
        product = weight.double().unsqueeze(1) * vectors[index].double()
        total = (total.double() + product).float()
    return total


def scattered(values: Tensor, indices: Tensor, chunk: int) -> Tensor:
    """Whole rows with `values` at `indices`, and zeros elsewhere."""
    return torch.zeros(len(values), chunk).scatter(1, indices, values)


def every_index(rows: Tensor) -> Tensor:
    return torch.arange(rows.shape[1]).expand(rows.shape)


def largest(rows: Tensor, k: int) -> Tensor:
    """The indices of the k largest magnitudes of each row, rising; the first of equal ones."""
    falling = rows.abs().sort(dim=1, descending=True, stable=True).indices
    return falling[:, :k].sort(1).values


class Exchange:
    """Turns what each replica sends into one update, the same for all.

    Args:
        rows: Of the parameters.
        k: Coefficients of each row that are sent.
        link: "all-reduce", "all-gather" or "owner".
        shared: Whether all replicas send the same indices.
        summed: Whether few coefficients are summed without an aggregate first, as cosines of a DCT.
        period: Steps from one sending of a coordinate to the next.
        cancel: Whether the zeros of an even number of replicas cancel at once.
    """

    def __init__(
        self,
        rows: Rows,
        replicas: int,
        k: int,
        precision: str,
        aggregate: str,
        link: str,
        shared: bool,
        summed: bool = False,
        period: int = 1,
        cancel: bool = False,
    ) -> None:
        self.rows = len(rows.inside)
        self.chunk = rows.chunk
        self.replicas = replicas
        self.k = k
        self.precision = precision
        self.aggregate = aggregate
        self.link = link
        self.shared = shared
        self.summed = summed
        self.period = period
        self.cancel = cancel or aggregate == "majority_vote"
        self.answer_k, self.answer_precision = self._answer_settings()
        self.owners = self._rows_of_owners() if link == "owner" else None
        count = self.rows if self.owners is None else self.owners.numel()
        self.residual = torch.zeros(count, self.chunk)

    def read(self, values: Tensor, step: int, replica: int) -> Tensor:
        """The values of a message as every receiver reads them.

        Through owners each part of the message is rounded by itself, and rows of zeros follow the
        last row, so that all parts have one length.
        """
        negative = zeros_are_negative(step // self.period, replica, self.replicas, self.cancel)
        return rounded(self._filled(values), self.precision, negative, self.owners)

    def update(self, values: list[Tensor], indices: list[Tensor], step: int) -> tuple:
        """The update of all messages, as coefficients of each row and their indices."""
        stacked = torch.stack(values)
        if self.link == "all-reduce":  # the network adds in the type of the message
            numbers = stacked.bfloat16() if self.precision == "bf16" else stacked
            return in_order(numbers).float() / self.replicas, indices[0]
        few = self.replicas * self.k <= min(self.chunk // 2, 64)
        if self.summed and few and self.aggregate == "mean" and self.owners is None:
            return torch.cat(values, 1) * (1 / self.replicas), torch.cat(indices, 1)
        padded = [self._filled_indices(each) for each in indices]
        if self.shared:
            where = padded[0]
            found = aggregated(stacked, stacked, self.aggregate)
        else:
            lines = [scattered(*pair, self.chunk) for pair in zip(values, padded, strict=True)]
            found = aggregated(torch.stack(lines), stacked, self.aggregate)
            where = every_index(found)
        if self.owners is None:
            return found, where
        return self._answer(scattered(found, where, self.chunk), where, step)

    def _answer(self, found: Tensor, where: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """What owners answer: they encode the aggregate again, and keep what they do not send."""
        self.residual = self.residual + found
        if not self.shared:
            where = largest(self.residual, self.answer_k)
        values = self.residual.gather(1, where)
        negative = zeros_are_negative(step // self.period)
        answer = rounded(values, self.answer_precision, negative, self.owners)
        self.residual = self.residual - scattered(answer, where, self.chunk)
        return answer[: self.rows], where[: self.rows]

    def _answer_settings(self) -> tuple[int, str]:
        """An answer is like a message if all send the same coordinates. Else it has as many as
        may have arrived, in two bits."""
        if self.shared:
            return self.k, self.precision
        most = min(self.replicas * self.k, max(4 * self.k, self.chunk // 4))
        return min(most, self.chunk), "2bit"

    def _rows_of_owners(self) -> Tensor:
        """The numbers of the rows that each replica owns: in turns, the rest in equal parts."""
        units = [
            block_rows(self.precision, self.k),
            block_rows(self.answer_precision, self.answer_k),
        ]
        turn = math.lcm(*units, 64)
        owned = -(-self.rows // self.replicas)
        numbers = torch.arange(owned * self.replicas)
        in_turns = self.rows // (self.replicas * turn) * self.replicas * turn
        turns = numbers[:in_turns].view(-1, self.replicas, turn).transpose(0, 1)
        rest = numbers[in_turns:].view(self.replicas, -1)
        return torch.cat([turns.reshape(self.replicas, -1), rest], 1)

    def _filled(self, values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, 0, 0, len(self.residual) - self.rows))

    def _filled_indices(self, indices: Tensor) -> Tensor:
        missing = len(self.residual) - self.rows
        return torch.cat([indices, torch.arange(self.k).expand(missing, -1)])


def block_rows(precision: str, k: int) -> int:
    """Rows after which a message can be cut: whole blocks of its precision, and whole bytes."""
    block = {"fp32": 1, "bf16": 1, "int8": 65536, "4bit": 256}.get(precision, 1024)
    return math.lcm(block // math.gcd(block, k), 8)


def zeros_are_negative(
    sending: int, replica: int = 0, replicas: int = 1, cancel: bool = True
) -> bool:
    """Whether zeros are sent as negative numbers where no code stands for zero.

    Sendings 2 n and 2 n + 1 of a coordinate have opposite signs, in an order that follows multiples
    of the golden ratio. Every second replica has the opposite of the first; without `cancel` one
    sign keeps a majority.
    """
    opposed = replica % 2 == 1 and (cancel or replica < replicas - 1)
    return ((sending // 2 * GOLDEN >> 63) + sending + opposed) % 2 == 1


def random_indices(rows: int, chunk: int, k: int, step: int, cycle: bool = True) -> Tensor:
    """The indices that a random selection sends at `step`: `[rows, k]`.

    In a cycle of chunk / k steps each row walks through one of 64 random permutations. Without a
    `cycle` each step assigns other permutations to the rows.
    """
    number, share = divmod(step, chunk // k)
    bits = (chunk - 1).bit_length()
    words = random_words(64 * chunk, 0, number, 0)
    tables = [words[first : first + chunk] for first in range(0, 64 * chunk, chunk)]
    orders = torch.tensor(
        [sorted(range(chunk), key=lambda i, t=table: (t[i] >> bits, i)) for table in tables]
    )
    octets = random_words(-(-rows // 8), 0, number, 1)
    chosen = [octets[row // 8] >> 8 * (row % 8) & 63 for row in range(rows)]
    if not cycle:
        deal = random_start(0, step, 2) % 64
        chosen = [choice ^ deal for choice in chosen]
    return orders[chosen, share * k : (share + 1) * k]


def random_words(count: int, *key: int) -> list[int]:
    """The first `count` words of splitmix64 from the start of `key`, as signed numbers."""
    start = random_start(*key)
    words = [mixed(start + GOLDEN * number) for number in range(1, count + 1)]
    return [word - 2**64 if word >= 2**63 else word for word in words]


def random_start(*key: int) -> int:
    start = 0
    for part in key:
        start = mixed(start + GOLDEN * (part + 1))
    return start


def mixed(word: int) -> int:
    """The mixing of splitmix64 (Steele, Lea & Flood, 2014)."""
    word %= 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio."""
