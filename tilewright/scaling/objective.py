"""The objective of the fit and its minimisation, for many data sets or weights at once.

    sum over runs of w Huber_delta( LSE(a - alpha log N, b - beta log D, e) - log L ),   A = exp a, B = exp b, E = exp e

Source: Hoffmann et al. 2022, appendix D.2. LSE is log-sum-exp, which keeps A, B and E positive. With the Huber loss of the
logarithm, a run that diverged has little influence. Shapes: R fits, M runs; p_R5 are a, b, e, alpha, beta; all float64.
"""

import numpy as np

from tilewright.scaling.runs import Array

__all__ = ["huber", "logs_and_shares", "minimise", "objective_and_gradient"]

_LARGEST_DAMPING = 1e10


def logs_and_shares(p_R5: Array, n_M: Array, d_M: Array) -> tuple[Array, Array]:
    """(log L of the law, [R, M]; the shares of A / N^alpha, B / D^beta and E in L, [3, R, M])."""
    a, b, e, alpha, beta = (p_R5[:, i : i + 1] for i in range(5))
    terms = np.empty((3, len(p_R5), len(n_M)))
    np.subtract(a, alpha * n_M, out=terms[0])
    np.subtract(b, beta * d_M, out=terms[1])
    terms[2] = e
    top = terms.max(axis=0)
    shares = np.exp(terms - top)
    total = shares.sum(axis=0)
    return top + np.log(total), shares / total


def huber(r: Array, delta: float) -> Array:
    """r^2 / 2 up to delta, then a line (Huber, 1964)."""
    size = np.abs(r)
    return np.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta))


def objective_and_gradient(p_5: Array, n_M: Array, d_M: Array, y_M: Array, delta: float) -> tuple[float, Array]:
    """The objective and its gradient at one point; every run has weight 1."""
    logs, shares = logs_and_shares(p_5[None], n_M, d_M)
    r = logs[0] - y_M
    return float(huber(r, delta).sum()), _jacobian(shares, n_M, d_M)[0].T @ np.clip(r, -delta, delta)


def _jacobian(shares: Array, n_M: Array, d_M: Array) -> Array:
    """Derivatives of log L with respect to the five parameters, [R, M, 5]."""
    slopes = np.empty((*shares.shape[1:], 5))
    slopes[:, :, :3] = shares.transpose(1, 2, 0)
    np.multiply(-n_M, shares[0], out=slopes[:, :, 3])
    np.multiply(-d_M, shares[1], out=slopes[:, :, 4])
    return slopes


def minimise(
    p_R5: Array, n_M: Array, d_M: Array, y_RM: Array, w_RM: Array, delta: float, *, steps: int = 60, tolerance: float = 1e-7
) -> tuple[Array, Array]:
    """Minimise from each start. Returns parameters [R, 5] and objectives [R], which are never above those of the starts.

    The method of Levenberg and Marquardt on reweighted squares, for all fits at once: in each step the Huber loss is replaced
    by a parabola that touches it at the current point and lies above it elsewhere. `y_RM` and `w_RM` may be [1, M]. A fit is
    finished when a step reduces its objective relatively by less than `tolerance`.
    """
    p_R5 = p_R5.copy()
    fits = np.arange(len(p_R5))
    p = p_R5
    logs, shares = logs_and_shares(p, n_M, d_M)
    r = logs - y_RM
    value_R = (w_RM * huber(r, delta)).sum(axis=1)
    value, damping = value_R.copy(), np.full(len(p), 1e-3)
    for _ in range(steps):
        slopes = _jacobian(shares, n_M, d_M)
        weighted = (slopes * (w_RM * np.minimum(1, delta / np.maximum(np.abs(r), 1e-300)))[:, :, None]).transpose(0, 2, 1)
        curvature = weighted @ slopes
        diagonal = np.einsum("rii->ri", curvature)
        damped = curvature + (damping[:, None] * diagonal + 1e-300)[:, :, None] * np.eye(5)
        tried = p - np.linalg.solve(damped, weighted @ r[:, :, None])[:, :, 0]
        new_logs, new_shares = logs_and_shares(tried, n_M, d_M)
        new_r = new_logs - y_RM
        new_value = (w_RM * huber(new_r, delta)).sum(axis=1)
        better = new_value < value
        small = better & (value - new_value < tolerance * value)
        p, r = np.where(better[:, None], tried, p), np.where(better[:, None], new_r, r)
        value = np.where(better, new_value, value)
        shares = np.where(better[:, None], new_shares, shares)
        damping = np.clip(np.where(better, damping / 5, damping * 8), 1e-12, 10 * _LARGEST_DAMPING)
        going = ~small & (damping < _LARGEST_DAMPING)
        if going.all():
            continue
        # Finished fits leave the arrays: the others need a few more steps, the last ones many.
        p_R5[fits], value_R[fits] = p, value
        if not going.any():
            return p_R5, value_R
        fits, p, r, value, damping, shares = fits[going], p[going], r[going], value[going], damping[going], shares[:, going]
        y_RM, w_RM = (given if len(given) == 1 else given[going] for given in (y_RM, w_RM))
    p_R5[fits], value_R[fits] = p, value
    return p_R5, value_R
