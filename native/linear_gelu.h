/*
 * linear_gelu.h: GELU for results in bfloat16, by vectors of 16 lanes. Included by linear_finish.h.
 *
 * It is 31 parabolas, each 0.305 wide; beyond the last ones it is 0 and x. A lane finds its parabola by the last five bits of
 * a number that was rounded to a whole one. The error is at most 0.54 of what rounding to bfloat16 may add, plus 2e-5.
 *
 * WHY NOT A POLYNOMIAL over the whole range, as in linear_finish.h: while a matrix unit works, products and sums of 512
 * bits have one port in place of two, and choices among table entries another one. This takes four of the first and three
 * of the second, that thirteen of the first.
 */

/* Of the parabola at 0, those above it, and those below it: what is added, the slope, the curvature. */
static const float parabolas[3][32] __attribute__((aligned(64))) = {
    {0, -1.1374662e-03f, -2.0846013e-02f, -8.8012867e-02f, -2.0478581e-01f, -3.3232337e-01f, -4.1593054e-01f, -4.2319334e-01f,
     -3.6109242e-01f, -2.6358324e-01f, -1.6684043e-01f, -9.2456430e-02f, -4.5174520e-02f, -1.9565726e-02f, -7.5430963e-03f, 0,
     0, 0, -7.5198780e-03f, -1.9503869e-02f, -4.5017153e-02f, -9.2070103e-02f, -1.6598342e-01f, -2.6209289e-01f,
     -3.5940617e-01f, -4.2244810e-01f, -4.1702098e-01f, -3.3496785e-01f, -2.0773131e-01f, -9.0053260e-02f, -2.1655060e-02f, -1.2349939e-03f},
    {4.9999702e-01f, 5.1221979e-01f, 5.9738010e-01f, 7.7424079e-01f, 9.9488956e-01f, 1.1829287e+00f, 1.2843760e+00f, 1.2927172e+00f,
     1.2387533e+00f, 1.1634550e+00f, 1.0964612e+00f, 1.0498048e+00f, 1.0227090e+00f, 1.0092016e+00f, 1.0033284e+00f, 1,
     0, 0, -3.3175065e-03f, -9.1704410e-03f, -2.2622880e-02f, -4.9574260e-02f, -9.5898777e-02f, -1.6236836e-01f,
     -2.3737037e-01f, -2.9201975e-01f, -2.8557387e-01f, -1.8641718e-01f, 2.3575990e-04f, 2.2121798e-01f, 3.9984930e-01f, 4.8700106e-01f},
    {3.9770773e-01f, 3.6469164e-01f, 2.7182516e-01f, 1.5499973e-01f, 5.0590735e-02f, -1.8785657e-02f, -4.9573302e-02f, -5.1935021e-02f,
     -4.0208183e-02f, -2.5667427e-02f, -1.4066663e-02f, -6.7492155e-03f, -2.8667261e-03f, -1.0854296e-03f, -3.6806092e-04f, 0,
     0, 0, -3.6678513e-04f, -1.0814881e-03f, -2.8549617e-03f, -6.7148600e-03f, -1.3974495e-02f, -2.5469657e-02f,
     -3.9925184e-02f, -5.1772211e-02f, -4.9901109e-02f, -1.9930352e-02f, 4.8589699e-02f, 1.5250836e-01f, 2.6952904e-01f, 3.6334947e-01f},
};

INLINE vector gelu_in_short(vector x)
{
    const float width = 0.305f;
    vector inside = (vector)_mm512_range_ps((__m512)x, _mm512_set1_ps(14.9f * width), 2); /* the smaller size, x's sign */
    __m512i place = (__m512i)(inside * (1 / width) + 0x1.8p23f);
    vector part[3];
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++)
        part[i] = (vector)_mm512_permutex2var_ps(_mm512_load_ps(parabolas[i]), place, _mm512_load_ps(parabolas[i] + 16));
    return (part[2] * inside + part[1]) * x + part[0];
}
