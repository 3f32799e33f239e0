"""Statistics and logit gradients of a tile of rows, in place over its logits: the elementwise half of the fused head.

With z the draft's logits over the temperature, q = softmax z and h_i = q_i dL/dq_i (dL/dq only up to a constant, which softmax takes out),
every loss has

    dz = h - q sum h

    forward KL   h = -p                       TVD    h = -q where q <= p
    reverse KL   h = q log(q/p)               NLA    TVD's / alpha
    JSD(b)       h = (1-b) q log(q/m)         CE     h = -1 at the token
    LK           l KL's + (1-l) TVD's, l = exp(-eta alpha)

**Recorded**: h is needed at K + 1 outcomes only, in float64, since they are few. Inside the bucket every id has the same ratio h_i / q_i, so
dz = q_i (h_tail / q_tail - sum h): a row scalar times q, whatever the loss. Two passes over the logits do it (``row_sums``, ``row_scale``).
**Dense**: p of every id from the target's own logits.

Both take ``weigh``, called once with alpha of the rows when it is known and before gradients are formed; it gives the rows' weights.
Shape suffixes: N rows, V head rows, K recorded ids, O = K + 1 outcomes, the bucket last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftstill.distill.divergences import FLOOR, LOG_FLOOR, Objective, cut_bounds, cut_record, kept

Weigh = Callable[[Tensor], Tensor]

LOSS_TERMS = ("forward_kl", "reverse_kl", "jsd", "tvd", "nla", "ce")
"""What a loss is the sum of: LK's are forward KL and TVD."""
TOKEN_STATS = ("loss", "alpha_low", "alpha_high", "top1", "tail", "entropy_p", "entropy_q", *LOSS_TERMS)
"""What a kernel returns per token, [S, N]. tail: p's mass in the bucket; entropies in nats, of the recording's K + 1 outcomes if it is one;
each term's part of the loss, with its factor."""

_FARTHEST = 60.0
"""log(p/q) beyond which JSD has reached its limit to float32's last bit, and exp would soon overflow."""
_EQUAL = 32
"""Roundings of a logit by which p and q of the same weights differ where their products were formed in blocks of other sizes."""


def recorded(z_NV: Tensor, ids_NK: Tensor, p_NK: Tensor, tail_N: Tensor, token_N: Tensor | None, objective: Objective, weigh: Weigh,
             need_grad: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Per-token statistics [S, N] and weights [N]; z_NV becomes dL/dz_NV times the weights."""
    known = None
    if objective.cuts:
        z_NV.masked_fill_(~kept(z_NV, objective.top_k, objective.top_p), -torch.inf)
        p_NK = p_NK * (ids_NK >= 0)
        known = cut_bounds(p_NK, tail_N, objective.top_k, objective.top_p)
        p_NK, tail_N = cut_record(p_NK, tail_N, objective.top_k, objective.top_p)
    used = ids_NK >= 0
    # Unused places point at the row's first used id and write what is written there; a row without any keeps what it has.
    some, first = used.any(1, keepdim=True), used.to(torch.uint8).argmax(1, keepdim=True)
    ids = torch.where(used, ids_NK, ids_NK.gather(1, first)).clamp_min(0)
    z_NK = z_NV.gather(1, ids)
    z_token = None if token_N is None else z_NV.gather(1, token_N.clamp_min(0)[:, None])[:, 0].double()
    # The bucket is summed from its members: 1 - sum(q_K) would lose a thin one to cancellation.
    z_NV.scatter_(1, ids, torch.where(some, -torch.inf, z_NK))
    top_N, sum_N = row_sums(z_NV)
    z_K, log_tail = z_NK.double().masked_fill(~used, -torch.inf), top_N.double() + sum_N.double().log()
    z_NO = torch.cat([z_K, log_tail[:, None]], 1)
    lse = z_NO.logsumexp(1)
    lq, p = z_NO - lse[:, None], torch.cat([p_NK.double() * used, tail_N.double()[:, None]], 1)
    q = lq.exp()
    lq, lp = torch.where(q > 0, lq, LOG_FLOOR), torch.where(p > 0, p.clamp_min(1e-300).log(), LOG_FLOOR)

    both = torch.minimum(p, q)
    low, alpha = both[:, :-1].sum(1), both.sum(1)
    high, largest = alpha, p
    if known is not None:
        least_NK, most_NK, rest_N = known
        largest = torch.cat([most_NK, rest_N[:, None]], 1)
        low, high = torch.minimum(least_NK, q[:, :-1]).sum(1), torch.minimum(largest, q).sum(1)
    part, scale = _coefficients(objective, alpha)
    h, r = torch.zeros_like(q), lp - lq
    total = (q - p).sum(1)
    if "forward_kl" in scale:
        part["forward_kl"] = scale["forward_kl"] * ((p * r).sum(1) + total)
        h -= _column(scale["forward_kl"]) * p * (q > 0)
    if "reverse_kl" in scale:
        part["reverse_kl"] = scale["reverse_kl"] * (-(q * r).sum(1) - total)
        h -= _column(scale["reverse_kl"]) * q * r
    if "jsd" in scale:
        far, m = r.clamp(-_FARTHEST, _FARTHEST), objective.beta * p + (1 - objective.beta) * q
        L = torch.log1p(objective.beta * far.expm1())  # log(m/q)
        part["jsd"] = scale["jsd"] * (objective.beta * p * far - m * L).sum(1)
        h -= _column(scale["jsd"]) * (1 - objective.beta) * q * L
    if "tvd" in scale:
        # Nearer than the logits' own rounding, or than what is known of a cut law, counts as equal: at p = q the gradient is then 0, not noise.
        below = q <= largest * (1 + _EQUAL * torch.finfo(z_NV.dtype).eps)
        part["tvd"] = scale["tvd_value"] * (p - q).clamp_min(0).sum(1)
        h -= _column(scale["tvd"]) * q * below
    if "ce" in scale:
        assert z_token is not None and token_N is not None
        part["ce"] = scale["ce"] * (token_N >= 0) * torch.where(torch.isfinite(z_token), lse - z_token, -LOG_FLOOR)
    agree = p_NK.mul(used).argmax(1, keepdim=True)
    top1 = used[:, 0] & (z_K.gather(1, agree)[:, 0] >= torch.maximum(z_K.amax(1), top_N.double()))
    stats = _statistics(part, low, high, top1.double(), p[:, -1], -(p * lp).sum(1), -(q * lq).sum(1))
    weight = weigh(high)
    if not need_grad:
        return stats, weight
    w = weight.double() / objective.temperature
    dz_O = h - q * h.sum(1, keepdim=True)
    if "ce" in scale:
        assert token_N is not None and z_token is not None
        heard = scale["ce"] * (token_N >= 0) * torch.isfinite(z_token)  # cut off from q: no gradient
        dz_O = dz_O + heard[:, None] * q
    dz_O *= w[:, None]
    row_scale(z_NV, top_N, (dz_O[:, -1] / sum_N.double().clamp_min(1e-300)).to(z_NV.dtype))
    at_K = dz_O[:, :-1].to(z_NV.dtype)
    z_NV.scatter_(1, ids, torch.where(used, at_K, torch.where(some, at_K.gather(1, first), z_NV.gather(1, ids))))
    if "ce" in scale:
        assert token_N is not None
        z_NV.scatter_add_(1, token_N.clamp_min(0)[:, None], (-heard * w).to(z_NV.dtype)[:, None])
    return stats, weight


def dense(z_NV: Tensor, y_NV: Tensor, token_N: Tensor | None, objective: Objective, weigh: Weigh, need_grad: bool, holes: bool
          ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``recorded``, with y_NV the target's logits over the temperature (overwritten).

    Args:
        holes: some logits may be -inf.
    """
    if objective.cuts:
        z_NV.masked_fill_(~kept(z_NV, objective.top_k, objective.top_p), -torch.inf)
        y_NV.masked_fill_(~kept(y_NV, objective.top_k, objective.top_p), -torch.inf)
        holes = True
    lq, lp = torch.log_softmax(z_NV, -1), torch.log_softmax(y_NV, -1)
    q, p = lq.exp(), torch.exp(lp, out=y_NV)
    gone = None
    if holes:
        gone = lq == -torch.inf
        lq.masked_fill_(gone, LOG_FLOOR)
        lp.masked_fill_(lp == -torch.inf, LOG_FLOOR)
    top1 = ((lp == _column(lp.amax(1))) & (lq == _column(lq.amax(1)))).any(1)
    entropy_p, entropy_q = -_dot(p, lp), -_dot(q, lq)
    lq_token = None if token_N is None else lq.gather(1, token_N.clamp_min(0)[:, None])[:, 0]
    r = lp.sub_(lq)
    d = torch.sub(q, p, out=lq)
    tvd = 0.5 * d.abs().sum(1)
    names = {name for name, _ in objective.terms}
    alpha = (
        torch.minimum(p, q).sum(1) if "nla" in names else (1 - tvd).clamp_min(0)
    )  # 1 - tvd would lose a small alpha, sum min a small tvd
    part, scale = _coefficients(objective, alpha, tvd)
    total, cross, jensen = d.sum(1), None, None
    if "forward_kl" in scale:
        part["forward_kl"] = scale["forward_kl"] * (_dot(p, r) + total)
    if "reverse_kl" in scale:
        cross = _dot(q, r)
        part["reverse_kl"] = scale["reverse_kl"] * -(cross + total)
    if "jsd" in scale:
        beta, far = objective.beta, r.clamp(-_FARTHEST, _FARTHEST)
        L = _log1p(_expm1(far).mul_(beta))  # log(m/q)
        jensen = _dot(q, L)
        part["jsd"] = scale["jsd"] * (beta * (_dot(p, far) - _dot(p, L)) - (1 - beta) * jensen)
    if "tvd" in scale:
        part["tvd"] = scale["tvd_value"] * tvd
    if "ce" in scale:
        assert token_N is not None and lq_token is not None
        part["ce"] = -scale["ce"] * torch.where(token_N >= 0, lq_token, 0.0)
    stats = _statistics(part, alpha, alpha, top1.to(tvd.dtype), torch.zeros_like(tvd), entropy_p, entropy_q)
    weight = weigh(alpha)
    if not need_grad:
        return stats, weight
    w = weight.to(z_NV.dtype) / objective.temperature
    fresh = True  # nothing is in z_NV yet

    def add(a: Tensor, b: Tensor | None, c_N: Tensor) -> None:
        nonlocal fresh
        if fresh:
            torch.mul(a, _column(c_N), out=z_NV)
            if b is not None:
                z_NV.mul_(b)
        else:
            z_NV.addcmul_(a, _column(c_N) if b is None else b * _column(c_N))
        fresh = False

    if "forward_kl" in scale:
        if gone is None:
            add(d, None, w * scale["forward_kl"])
        else:  # sum over the kept p, times q, less p there
            left = p.masked_fill(gone, 0.0)
            add(q * left.sum(1, keepdim=True) - left, None, w * scale["forward_kl"])
    if cross is not None:
        add(r.sub_(_column(cross)), q, -w * scale["reverse_kl"])
    if jensen is not None:
        add(L.sub_(_column(jensen)), q, -w * scale["jsd"] * (1 - objective.beta))
    if "tvd" in scale:
        below = (d.sub_(p, alpha=_EQUAL * torch.finfo(d.dtype).eps) <= 0).to(d.dtype)  # as in ``recorded``
        add(below.sub_(_column(_dot(q, below))), q, -w * scale["tvd"])
    if "ce" in scale:
        assert token_N is not None and lq_token is not None
        heard = w * scale["ce"] * (token_N >= 0)
        if gone is not None:
            heard = heard * ~gone.gather(1, token_N.clamp_min(0)[:, None])[:, 0]
        add(q, None, heard)
        z_NV.scatter_add_(1, token_N.clamp_min(0)[:, None], -heard[:, None])
    return stats, weight


def _statistics(part: dict[str, Tensor], alpha_low: Tensor, *others: Tensor) -> Tensor:
    """In the order of TOKEN_STATS."""
    terms = [part.get(name, torch.zeros_like(alpha_low)) for name in LOSS_TERMS]
    return torch.stack([torch.stack(terms).sum(0), alpha_low, *others, *terms])


def _coefficients(objective: Objective, alpha_N: Tensor, tvd_N: Tensor | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """NLA's part of the loss, and how much of each basic divergence the objective holds per token.

    ``tvd`` scales TVD's gradient, ``tvd_value`` its value: NLA has TVD's direction and a value of its own.
    """
    part: dict[str, Tensor] = {}
    scale: dict[str, Tensor] = {}

    def put(name: str, value: Tensor) -> None:
        scale[name] = scale[name] + value if name in scale else value

    one = torch.ones_like(alpha_N)
    for name, factor in objective.terms:
        if name == "lk":
            share = torch.exp(-objective.eta * alpha_N)
            put("forward_kl", factor * share)
            put("tvd", factor * (1 - share))
            put("tvd_value", factor * (1 - share))
        elif name == "nla":
            some = alpha_N.clamp_min(FLOOR)  # where the laws share nothing there is no gradient
            part["nla"] = part.get("nla", 0.0) + factor * (
                -some.log() if tvd_N is None else torch.where(tvd_N < 0.5, -torch.log1p(-tvd_N), -some.log())
            )
            put("tvd", factor / some * (alpha_N > FLOOR))
            put("tvd_value", 0 * one)
        else:
            put(name, factor * one)
            if name == "tvd":
                put("tvd_value", factor * one)
    return part, scale


def _column(x_N: Tensor) -> Tensor:
    return x_N[:, None]


def _dot(a_NV: Tensor, b_NV: Tensor) -> Tensor:
    """Row by row. In a tile that stays in cache three times as fast as a batched product, for all its temporary."""
    return (a_NV * b_NV).sum(1)


def _expm1(x: Tensor) -> Tensor:
    """exp x - 1 by Kahan's correction of exp; torch.expm1 takes ten times as long (float32, one thread). x not below -80."""
    u = x.exp()
    d = u - 1
    return torch.where(d == 0, x, d.mul_(x).div_(u.log_()))


def _log1p(x: Tensor) -> Tensor:
    """log(1 + x) likewise."""
    u = x + 1
    d = u - 1
    return torch.where(d == 0, x, u.log_().mul_(x).div_(d))


def row_sums(z_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Largest entry and sum of exp(z - largest) of each row; a row of -inf alone gives a sum of 0. Leaves z to ``row_scale``."""
    if _triton(z_NV):
        from draftstill.distill import fused_triton

        return fused_triton.row_sums(z_NV)
    top_N = z_NV.amax(1).clamp_min(torch.finfo(z_NV.dtype).min)
    z_NV.sub_(_column(top_N)).exp_()  # here already: one exponential per entry
    return top_N, z_NV.sum(1)


def row_scale(z_NV: Tensor, top_N: Tensor, factor_N: Tensor) -> None:
    """z becomes factor exp(z - top)."""
    if _triton(z_NV):
        from draftstill.distill import fused_triton

        fused_triton.row_scale(z_NV, top_N, factor_N)
    else:
        z_NV.mul_(_column(factor_N))


def _triton(z: Tensor) -> bool:
    """CUDA in float32, where Triton is installed (it comes with torch's CUDA wheels)."""
    if not (z.is_cuda and z.dtype == torch.float32):
        return False
    from importlib.util import find_spec

    return find_spec("triton") is not None
