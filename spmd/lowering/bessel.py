"""Bessel and Airy functions by the rational and Chebyshev approximations that torch uses.

Source: aten/src/ATen/native/Math.h of PyTorch 2.13 (after Cephes). The coefficients are copied from there, highest power first.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower

# fmt: off
_AIRY_AN = (
    0.346538101525629, 12.007595273964581, 76.27960536152345, 168.08922493463058, 159.75639135016442, 70.53609068404442,
    14.026469116338967, 1.0,
)
_AIRY_AD = (
    0.5675945326387702, 14.75625625848472, 84.51389701414746, 177.31808814540045, 164.2346928715297, 71.47784008255756,
    14.095913560783403, 1.0,
)
_AIRY_AFN = (
    -0.1316963234183318, -0.6264565444319123, -0.6931580360369335, -0.2797799815451191, -0.04919001326095003, -0.004062659235948854,
    -0.0001592764962392621, -2.776491081552329e-06, -1.6778769848911465e-08,
)
_AIRY_AFD = (
    13.356042070655324, 32.682503279522464, 26.736704094149957, 9.187074029072596, 1.4752914677166642, 0.11568717379518804,
    0.004402916416152112, 7.547203482874142e-05, 4.5185009297058035e-07,
)
_AIRY_AGN = (
    0.01973399320916857, 0.39110302961568827, 1.0657989759959559, 0.9391692298166502, 0.35146565610554764, 0.06338889196289255,
    0.005858041130483885, 0.000282851600836737, 6.98793669997261e-06, 8.117892395543892e-08, 3.415517847659236e-10,
)
_AIRY_AGD = (
    9.30892908077442, 19.835292871831214, 15.564662893286462, 5.476860694229755, 0.9542936116189619, 0.08645808263523921,
    0.004126565238242226, 0.00010125908511650914, 1.1716673321441352e-06, 4.9183457006293e-09,
)
_J0_PP = (
    0.0007969367292973471, 0.08283523921074408, 1.239533716464143, 5.447250030587687, 8.74716500199817, 5.303240382353949, 1.0,
)
_J0_PQ = (
    0.0009244088105588637, 0.08562884743544745, 1.2535274390105895, 5.470977403304171, 8.761908832370695, 5.306052882353947, 1.0,
)
_J0_QP = (
    -0.011366383889846916, -1.2825271867050931, -19.553954425773597, -93.20601521237683, -177.68116798048806, -147.07750515495118,
    -51.41053267665993, -6.050143506007285,
)
_J0_QQ = (
    64.3178256118178, 856.4300259769806, 3882.4018360540163, 7240.467741956525, 5930.727011873169, 2062.0933166032783, 242.0057402402914,
)
_J0_RP = (
    -4794432209.782018, 1956174919465.5657, -249248344360967.72, 9708622510473064.0,
)
_J0_RQ = (
    499.563147152651, 173785.4016763747, 48440965.83399621, 11185553704.535683, 2112775201154.892, 310518229857422.56,
    3.1812195594320496e+16, 1.7108629408104315e+18,
)
_Y0_YP = (
    15592.436785523574, -14663929.59039716, 5435264770.518765, -982136065717.9115, 87590639439536.7, -3466283033847297.0,
    4.4273326857256984e+16, -1.8495080043698668e+16,
)
_Y0_YQ = (
    1041.2835366425984, 626107.330137135, 268919633.39381415, 86400248710.3935, 20297961275010.555, 3171577528429750.5,
    2.5059625617265306e+17,
)
_J1_PP = (
    0.0007621256162081731, 0.07313970569409176, 1.1271960812968493, 5.112079511468076, 8.424045901417724, 5.214515986823615, 1.0,
)
_J1_PQ = (
    0.0005713231280725487, 0.06884559087544954, 1.105142326340617, 5.073863861286015, 8.399855543276042, 5.209828486823619, 1.0,
)
_J1_QP = (
    0.05108625947501766, 4.982138729512334, 75.82382841325453, 366.7796093601508, 710.8563049989261, 597.4896124006136,
    211.68875710057213, 25.207020585802372,
)
_J1_QQ = (
    74.23732770356752, 1056.4488603826283, 4986.410583376536, 9562.318924047562, 7997.041604473507, 2826.1927851763908, 336.0936078106983,
)
_J1_RP = (
    -899971225.7055594, 452228297998.19403, -72749424522181.83, 3682957328638529.0,
)
_J1_RQ = (
    620.8364781180543, 256987.25675774884, 83514679.14319493, 22151159547.97925, 4749141220799.914, 784369607876235.9,
    8.952223361846274e+16, 5.322786203326801e+18,
)
_Y1_YP = (
    1263204747.9017804, -647355876379.1603, 114509511541823.73, -8127702555013251.0, 2.024394757135949e+17, -7.788771962659501e+17,
)
_Y1_YQ = (
    594.3015923461282, 235564.09294306856, 73481194.44597217, 18760131610.870617, 3882312774962.3857, 620557727146953.8,
    6.871410873553005e+16, 3.9727060811656064e+18,
)
_K0_A = (
    1.374465435613523e-16, 4.25981614279661e-14, 1.0349695257633842e-11, 1.904516377220209e-09, 2.5347910790261494e-07,
    2.286212103119452e-05, 0.001264615411446926, 0.0359799365153615, 0.3442898999246285, -0.5353273932339028,
)
_K0_B = (
    5.300433772686263e-18, -1.6475804301524212e-17, 5.2103915050390274e-17, -1.678231096805412e-16, 5.512055978524319e-16,
    -1.848593377343779e-15, 6.3400764774050706e-15, -2.2275133269916698e-14, 8.032890775363575e-14, -2.9800969231727303e-13,
    1.140340588208475e-12, -4.514597883373944e-12, 1.8559491149547177e-11, -7.957489244477107e-11, 3.577397281400301e-10,
    -1.69753450938906e-09, 8.574034017414225e-09, -4.660489897687948e-08, 2.766813639445015e-07, -1.8317555227191195e-06,
    1.39498137188765e-05, -0.00012849549581627802, 0.0015698838857300533, -0.0314481013119645, 2.4403030820659555,
)
_K1_A = (
    -7.023863479386288e-18, -2.427449850519366e-15, -6.666901694199329e-13, -1.4114883926335278e-10, -2.213387630734726e-08,
    -2.4334061415659684e-06, -0.0001730288957513052, -0.006975723859639864, -0.12261118082265715, -0.3531559607765449, 1.5253002273389478,
)
_K1_B = (
    -5.756744483665017e-18, 1.7940508731475592e-17, -5.689462558442859e-17, 1.838093544366639e-16, -6.057047248373319e-16,
    2.038703165624334e-15, -7.019837090418314e-15, 2.4771544244813043e-14, -8.976705182324994e-14, 3.3484196660784293e-13,
    -1.2891739609510289e-12, 5.13963967348173e-12, -2.1299678384275683e-11, 9.218315187605006e-11, -4.1903547593418965e-10,
    2.015049755197033e-09, -1.0345762465678097e-08, 5.7410841254500495e-08, -3.5019606030878126e-07, 2.406484947837217e-06,
    -1.936197974166083e-05, 0.00019521551847135162, -0.002857816859622779, 0.10392373657681724, 2.7206261904844427,
)
# fmt: on
_PI_4, _3_PI_4 = math.pi / 4, 3 * math.pi / 4
_2_PI, _SQRT_2_PI, _SQRT_1_PI = 2 / math.pi, math.sqrt(2 / math.pi), 1 / math.sqrt(math.pi)


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    out = jnp.zeros_like(x)
    for coefficient in coefficients:
        out = out * x + coefficient
    return out


def _chebyshev(x: Any, coefficients: tuple[float, ...]) -> Any:
    """The Chebyshev series with these coefficients at x / 2, its constant term halved (Cephes' `chbevl`)."""
    before, last, out = jnp.zeros_like(x), jnp.zeros_like(x), jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        before, last = last, out
        out = x * last - before + coefficient
    return 0.5 * (out - before)


def _asymptotic(x: Any, phase: float, tables: tuple[tuple[float, ...], ...], kind: int) -> Any:
    """The asymptotic form for x > 5, of the first kind (the cosine leads) or the second kind (the sine leads)."""
    pp, pq, qp, qq = tables
    w = (5.0 / x) * (5.0 / x)
    even = _polynomial(w, pp) / _polynomial(w, pq)
    odd = 5.0 / x * (_polynomial(w, qp) / _polynomial(w, qq))
    cos, sin = jnp.cos(x - phase), jnp.sin(x - phase)
    wave = even * cos - odd * sin if kind == 1 else even * sin + odd * cos
    return wave * _SQRT_2_PI / jnp.sqrt(x)


_J0_ASYMPTOTIC = (_J0_PP, _J0_PQ, _J0_QP, _J0_QQ)
_J1_ASYMPTOTIC = (_J1_PP, _J1_PQ, _J1_QP, _J1_QQ)


@lower("special_bessel_j0", pointwise=True)
def special_bessel_j0(self: Any) -> Any:
    x = jnp.abs(self)
    xx = x * x
    near = (xx - 5.78318596294678452118e00) * (xx - 3.04712623436620863991e01) * _polynomial(xx, _J0_RP) / _polynomial(xx, _J0_RQ)
    near = jnp.where(x < 0.00001, 1.0 - xx / 4.0, near)
    return jnp.where(x <= 5.0, near, _asymptotic(x, _PI_4, _J0_ASYMPTOTIC, 1))


@lower("special_bessel_j1", pointwise=True)
def special_bessel_j1(self: Any) -> Any:
    x = jnp.abs(self)
    xx = x * x
    near = _polynomial(xx, _J1_RP) / _polynomial(xx, _J1_RQ) * x * (xx - 1.46819706421238932572e01) * (xx - 4.92184563216946036703e01)
    out = jnp.where(x <= 5.0, near, _asymptotic(x, _3_PI_4, _J1_ASYMPTOTIC, 1))
    return jnp.where(self < 0, -out, out)


def _on_positive(x: Any, out: Any, at_zero: float) -> Any:
    """`out` for x > 0, its limit `at_zero` for 0, NaN for x < 0."""
    return jnp.where(x == 0, at_zero, jnp.where(x < 0, jnp.nan, out))


@lower("special_bessel_y0", pointwise=True)
def special_bessel_y0(self: Any) -> Any:
    xx = self * self
    near = _polynomial(xx, _Y0_YP) / _polynomial(xx, _Y0_YQ) + _2_PI * jnp.log(self) * special_bessel_j0(self)
    return jnp.where(self <= 5.0, _on_positive(self, near, -jnp.inf), _asymptotic(self, _PI_4, _J0_ASYMPTOTIC, 2))


@lower("special_bessel_y1", pointwise=True)
def special_bessel_y1(self: Any) -> Any:
    xx = self * self
    near = self * (_polynomial(xx, _Y1_YP) / _polynomial(xx, _Y1_YQ))
    near = near + _2_PI * (special_bessel_j1(self) * jnp.log(self) - 1.0 / self)
    return jnp.where(self <= 5.0, _on_positive(self, near, -jnp.inf), _asymptotic(self, _3_PI_4, _J1_ASYMPTOTIC, 2))


@lower("special_spherical_bessel_j0", pointwise=True)
def special_spherical_bessel_j0(self: Any) -> Any:
    series = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in reversed(range(7)))
    out = jnp.where(jnp.abs(self) < 0.5, _polynomial(self * self, series), jnp.sin(self) / self)
    return jnp.where(jnp.isinf(self), 0.0, out)


@lower("i0", "special_modified_bessel_i0", pointwise=True)
def i0(self: Any) -> Any:
    return jnp.exp(jnp.abs(self)) * lax.bessel_i0e(self)


@lower("special_i1", "special_modified_bessel_i1", pointwise=True)
def special_i1(self: Any) -> Any:
    return jnp.exp(jnp.abs(self)) * lax.bessel_i1e(self)


lower("special_i0e", pointwise=True)(lax.bessel_i0e)
lower("special_i1e", pointwise=True)(lax.bessel_i1e)


def _k0_near(x: Any) -> Any:
    return _chebyshev(x * x - 2.0, _K0_A) - jnp.log(0.5 * x) * i0(x)


def _k1_near(x: Any) -> Any:
    return jnp.log(0.5 * x) * special_i1(x) + _chebyshev(x * x - 2.0, _K1_A) / x


def _k_asymptotic(x: Any, coefficients: tuple[float, ...]) -> Any:
    return _chebyshev(8.0 / x - 2.0, coefficients) / jnp.sqrt(x)


@lower("special_modified_bessel_k0", pointwise=True)
def special_modified_bessel_k0(self: Any) -> Any:
    out = jnp.where(self <= 2.0, _k0_near(self), jnp.exp(-self) * _k_asymptotic(self, _K0_B))
    return _on_positive(self, out, jnp.inf)


@lower("special_modified_bessel_k1", pointwise=True)
def special_modified_bessel_k1(self: Any) -> Any:
    out = jnp.where(self <= 2.0, _k1_near(self), jnp.exp(-self) * _k_asymptotic(self, _K1_B))
    return _on_positive(self, out, jnp.inf)


@lower("special_scaled_modified_bessel_k0", pointwise=True)
def special_scaled_modified_bessel_k0(x: Any) -> Any:
    return _on_positive(x, jnp.where(x <= 2.0, _k0_near(x) * jnp.exp(x), _k_asymptotic(x, _K0_B)), jnp.inf)


@lower("special_scaled_modified_bessel_k1", pointwise=True)
def special_scaled_modified_bessel_k1(x: Any) -> Any:
    return _on_positive(x, jnp.where(x <= 2.0, _k1_near(x) * jnp.exp(x), _k_asymptotic(x, _K1_B)), jnp.inf)


def _airy_series() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Coefficients in x^3 of the two Maclaurin series that Ai combines. 16 terms give float64 precision below 2.09."""
    f, g = [1.0], [1.0]
    for k in range(1, 16):
        f.append(f[-1] / ((3 * k - 1) * (3 * k)))
        g.append(g[-1] / ((3 * k) * (3 * k + 1)))
    return tuple(reversed(f)), tuple(reversed(g))


@lower("special_airy_ai", pointwise=True)
def special_airy_ai(x: Any) -> Any:
    """An oscillating asymptotic form below -2.09, a decaying one from 2.09 on, and Maclaurin series in between."""
    root = jnp.sqrt(jnp.abs(x))
    zeta = 2.0 * jnp.abs(x) * root / 3.0
    z = 1.0 / zeta
    zz = z * z
    t = zeta + _PI_4
    sine = jnp.sin(t) * (1.0 + zz * _polynomial(zz, _AIRY_AFN) / _polynomial(zz, _AIRY_AFD))
    cosine = jnp.cos(t) * (z * _polynomial(zz, _AIRY_AGN) / _polynomial(zz, _AIRY_AGD))
    below = _SQRT_1_PI / jnp.sqrt(root) * (sine - cosine)
    above = _SQRT_1_PI * (_polynomial(z, _AIRY_AN) / _polynomial(z, _AIRY_AD)) / (2.0 * jnp.sqrt(root) * jnp.exp(zeta))
    f, g = _airy_series()
    cube = x * x * x
    middle = 0.355028053887817239260 * _polynomial(cube, f) - 0.258819403792806798405 * x * _polynomial(cube, g)
    out = jnp.where(x < -2.09, below, jnp.where(x >= 2.09, above, middle))
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.where(x > 103.892, 0.0, out))
