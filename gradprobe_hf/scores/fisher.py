"""Fisher: the loss that removing a weight adds, to second order.

With the Hessian's diagonal estimated by the empirical Fisher F (squared gradients of the summed loss), removing w_i
adds about `w_i^2 F_i / 2`. Sources: LeCun et al. 1989, Optimal Brain Damage, eq. 5, for the diagonal; Theis et al. 2018
(arXiv:1801.05787) for the empirical Fisher in its place. The factor 1/2 changes no order and is left out.
"""

from torch import Tensor


def fisher_score(weight: Tensor, fisher: Tensor) -> Tensor:
    """`score = W^2 * F`, `[out, in]`; of two probes, F is of the sums over both: the curvature on the path.

    >>> import torch
    >>> fisher_score(torch.tensor([[-2.0, 1.0]]), torch.tensor([[1.0, 3.0]]))
    tensor([[4., 3.]])
    """
    return weight.square() * fisher


def blended_fisher(sequence: Tensor, factored: Tensor) -> Tensor:
    """`F = sqrt(S * K)`, `[out, in]`: the detail of the sequence Fisher S, steadied by the factored Fisher K.

    S sums a squared gradient per sequence: unbiased, and noisy with few sequences. K is the outer product of two
    marginals: nearly free of noise, and blind to which input goes with which output gradient. The geometric mean lets
    each correct the other.
    Roots are taken before the product, which would underflow in float32.

    >>> import torch
    >>> blended_fisher(torch.tensor([[4.0]]), torch.tensor([[9.0]]))
    tensor([[6.]])
    """
    return sequence.sqrt() * factored.sqrt()
