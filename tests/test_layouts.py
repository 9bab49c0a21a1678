"""Tensors of every layout that a notebook and its cells have names for."""

from __future__ import annotations

import pytest
import torch

from mirror_nb.tensors.checksums import bits
from mirror_nb.tensors.layouts import address, nbytes, with_memory

TENSORS = {
    "COO": "torch.tensor([[0., 2.], [3., 0.]]).to_sparse()",
    "large COO": "torch.ones(200, 200).to_sparse()",
    "CSR": "torch.tensor([[0., 2.], [3., 0.]]).to_sparse_csr()",
    "CSC": "torch.tensor([[0., 2.], [3., 0.]]).to_sparse_csc()",
    "BSR": "torch.ones(4, 4).to_sparse_bsr((2, 2))",
    "mkldnn": "torch.ones(2, 3).to_mkldnn()",
    "complex32": "torch.ones(2, dtype=torch.complex32)",
    "nested": "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])",
    "jagged": "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)",
    "quantized": "torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)",
    "meta": "torch.empty(3, device='meta')",
}
pytestmark = pytest.mark.filterwarnings("ignore")
# Half of these torch calls prototypes.


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_a_tensor_of_any_layout_travels_and_cells_that_read_it_go_on(notebook, make):
    notebook.cell(f"import torch\nmade = {make}\nheld = [made]")
    notebook.here(f"own = {make}\nholds = {{'a': own}}")
    for _ in range(2):
        notebook.cell("layouts = [t.layout for t in (made, held[0], own, holds['a'])]")
    assert notebook.sent == []
    assert set(notebook.user_ns["layouts"]) == {notebook.user_ns["made"].layout}
    assert bits([notebook.user_ns["made"]]) == bits([notebook.there("made")]) == bits([notebook.there("own")])


@pytest.mark.parametrize(
    "make",
    [
        "(torch.eye(2) * (replica_id + 1)).to_sparse()",
        "(torch.eye(2) * (replica_id + 1)).to_sparse_csr()",
        "torch.full((2, 3), replica_id + 1.0).to_mkldnn()",
        "torch.nested.nested_tensor([torch.full((2,), replica_id + 1.0), torch.ones(3)])",
        "torch.full((2,), replica_id + 1, dtype=torch.complex32)",
        "torch.quantize_per_tensor(torch.ones(3), 0.1 * (replica_id + 1), 0, torch.qint8)",
    ],
    ids=["COO", "CSR", "mkldnn", "nested", "complex32", "quantized"],
)
def test_a_tensor_of_any_layout_comes_from_each_replica_where_it_differs(notebook, make):
    notebook.cell(f"import torch\nmade = {make}\nafter = 1")
    assert [bits([one]) for one in notebook.user_ns["made"]] == [bits([notebook.there("made", i)]) for i in range(2)]
    assert notebook.user_ns["after"] == 1


@pytest.mark.parametrize("layout", ["COO", "CSR"])
def test_what_is_written_to_a_sparse_tensor_is_seen_on_the_other_side(notebook, layout):
    notebook.here(f"own = {TENSORS[layout]}")
    notebook.cell("own.values()" if layout == "CSR" else "own")
    notebook.cell("own *= 2")
    assert notebook.user_ns["own"].to_dense().tolist() == [[0, 4], [6, 0]]
    notebook.here("own *= 2")
    notebook.cell("seen = own.to_dense().tolist()")
    assert notebook.user_ns["seen"] == [[0, 8], [12, 0]]


def test_a_network_with_a_sparse_buffer_is_the_same_on_both_sides(notebook):
    notebook.here("net = nn.Linear(2, 2); net.register_buffer('graph', torch.eye(2).to_sparse())")
    notebook.cell("with torch.no_grad():\n    net.weight += 1\n    net.graph *= 3")
    assert notebook.user_ns["net"].graph.to_dense().tolist() == [[3, 0], [0, 3]]
    assert torch.equal(notebook.user_ns["net"].weight, notebook.there("net").weight)


def test_a_network_with_an_expanded_buffer_is_trained(notebook):
    notebook.here("net = nn.Linear(2, 2); net.register_buffer('mask', torch.zeros(1).expand(3))")
    notebook.cell("with torch.no_grad():\n    net.weight += 1")
    assert torch.equal(notebook.user_ns["net"].weight, notebook.there("net").weight)
    notebook.cell("net.mask = torch.ones(1).expand(3)")
    notebook.cell("seen = net.mask.tolist()")
    assert notebook.user_ns["net"].mask.tolist() == notebook.user_ns["seen"] == [1, 1, 1]


def test_other_values_and_other_places_have_other_checksums():
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    others = (sparse.t().coalesce(), sparse * 2, sparse.to_sparse_csr(), torch.empty(2, 2, device="meta"))
    assert len({bits([tensor]) for tensor in (sparse, *others)}) == 5


def test_a_single_value_has_the_checksum_that_it_has_anywhere():
    # Torch keeps the stride of a column of one row, and does not look at its bytes then.
    assert bits([torch.ones(1, 5)[:, 2]]) == bits([torch.ones(1)])
    assert bits([torch.ones(2, 5)[:0, 2]]) == bits([torch.ones(0)])


def test_the_size_of_a_tensor_is_that_of_its_blocks():
    assert nbytes(torch.zeros(3)) == 12
    assert nbytes(torch.eye(2).to_sparse()) == 2 * 2 * 8 + 2 * 4
    assert nbytes(torch.zeros(3, device="meta")) == 0
    assert address(torch.eye(2).to_sparse()) == 0


class Scaled(torch.Tensor):
    """As torchao makes them: of other tensors, with few of torch's operations; and of more, as a DTensor its mesh."""

    mesh = None

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)

    def __init__(self, whole: torch.Tensor, scale: torch.Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale", "mesh"], None

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: tuple = (), kwargs: object = None) -> Scaled:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        raise NotImplementedError


def test_a_tensor_of_a_librarys_own_class_is_the_tensors_that_it_is_made_of():
    one, other = (Scaled(torch.ones(3, dtype=torch.int8), torch.tensor(scale)) for scale in (2.0, 3.0))
    assert (nbytes(one), address(one), with_memory(one) is one) == (3 + 4, 0, True)
    assert bits([one]) == bits([one.detach()]) != bits([other])


@pytest.mark.parametrize(("begin", "stride"), [(0, (3, 1)), (1, (1, 2))])
def test_a_tensor_that_was_left_without_memory_gets_it_and_keeps_what_it_has(begin, stride):
    enough = torch.arange(1.0, 7.0).as_strided((2, 2), stride, begin)
    assert with_memory(enough) is enough
    mapped = torch.frombuffer(bytearray(torch.arange(1.0, 7.0).numpy().tobytes()), dtype=torch.float32)
    short = mapped.as_strided((2, 2), stride, begin)
    with pytest.raises(RuntimeError, match="not resizable"):
        short.resize_(4, 3)
    with_memory(short)
    assert short.shape == (4, 3)
    assert short.flatten().tolist() == [*mapped[begin:].tolist(), *[0.0] * (6 + begin)]
    short.resize_(5, 3)


def test_a_tensor_that_was_to_be_larger_than_the_machine_keeps_what_it_has_in_a_row():
    short = torch.frombuffer(bytearray(torch.arange(6.0).numpy().tobytes()), dtype=torch.float32)[2:]
    with pytest.raises(RuntimeError, match="not resizable"):
        short.resize_(10**6, 10**7)
    assert with_memory(short).tolist() == [2, 3, 4, 5]
