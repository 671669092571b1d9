/*
 * linear_gelu.h: GELU for results in bfloat16, by vectors of 16 lanes. Included by linear_finish.h.
 *
 * It is 31 polynomials of third degree, each over a piece 0.31 wide; beyond the last ones it is 0 and x. A lane finds its
 * piece by the last five bits of a number that was rounded to a whole one. Right to 1.6e-5, of which bfloat16 sees nothing.
 *
 * WHY NOT A POLYNOMIAL over the whole range, as in linear_finish.h: while a matrix unit works, products and sums of 512
 * bits have one port in place of two, and choices among table entries another one. This takes five of the first and four
 * of the second, that thirteen of the first. Parabolas would save one of each, but are right to 1.5e-4 only.
 */

/* Of the piece around 0, those above it, and those below it: what is multiplied with no, one, two and three factors. */
static const float pieces[4][32] __attribute__((aligned(64))) = {
    {0, 3.9484462e-04f, 4.6098484e-03f, 4.1195098e-03f, -3.8383443e-02f, -1.5934755e-01f, -3.4302378e-01f, -5.1504624e-01f,
     -5.9564054e-01f, -5.5724961e-01f, -4.3425727e-01f, -2.8726542e-01f, -1.6344793e-01f, -8.0760404e-02f, -3.4904126e-02f, 0,
     0, 0, -3.4904126e-02f, -8.0760404e-02f, -1.6344793e-01f, -2.8726542e-01f, -4.3425727e-01f, -5.5724961e-01f,
     -5.9564054e-01f, -5.1504624e-01f, -3.4302378e-01f, -1.5934755e-01f, -3.8383443e-02f, 4.1195098e-03f, 4.6098484e-03f, 3.9484462e-04f},
    {5.0000000e-01f, 4.9401850e-01f, 4.6646798e-01f, 4.6596918e-01f, 5.8075321e-01f, 8.3968139e-01f, 1.1637195e+00f, 1.4218775e+00f,
     1.5278234e+00f, 1.4852309e+00f, 1.3601999e+00f, 1.2244939e+00f, 1.1199497e+00f, 1.0556569e+00f, 1.0226223e+00f, 1,
     0, 0, -2.2622308e-02f, -5.5656966e-02f, -1.1994972e-01f, -2.2449385e-01f, -3.6019996e-01f, -4.8523092e-01f,
     -5.2782339e-01f, -4.2187747e-01f, -1.6371953e-01f, 1.6031858e-01f, 4.1924679e-01f, 5.3403085e-01f, 5.3353202e-01f, 5.0598150e-01f},
    {3.9762327e-01f, 4.3145904e-01f, 4.9261320e-01f, 4.9639249e-01f, 3.9278641e-01f, 2.0767112e-01f, 1.6858622e-02f, -1.1240307e-01f,
     -1.5884809e-01f, -1.4310026e-01f, -1.0071384e-01f, -5.8936045e-02f, -2.9503413e-02f, -1.2835799e-02f, -4.9014329e-03f, 0,
     0, 0, -4.9014329e-03f, -1.2835799e-02f, -2.9503413e-02f, -5.8936045e-02f, -1.0071384e-01f, -1.4310026e-01f,
     -1.5884809e-01f, -1.1240307e-01f, 1.6858622e-02f, 2.0767112e-01f, 3.9278641e-01f, 4.9639249e-01f, 4.9261320e-01f, 4.3145904e-01f},
    {0, -7.6094948e-02f, -1.2213834e-01f, -1.2513629e-01f, -9.3875922e-02f, -4.9672913e-02f, -1.2168719e-02f, 9.4251074e-03f,
     1.6214941e-02f, 1.4274552e-02f, 9.4826669e-03f, 5.1939161e-03f, 2.4309901e-03f, 9.9029194e-04f, 3.5492456e-04f, 0,
     0, 0, -3.5492456e-04f, -9.9029194e-04f, -2.4309901e-03f, -5.1939161e-03f, -9.4826669e-03f, -1.4274552e-02f,
     -1.6214941e-02f, -9.4251074e-03f, 1.2168719e-02f, 4.9672913e-02f, 9.3875922e-02f, 1.2513629e-01f, 1.2213834e-01f, 7.6094948e-02f},
};

INLINE vector gelu_in_short(vector x)
{
    const float width = 0.31f;
    vector inside = (vector)_mm512_range_ps((__m512)x, _mm512_set1_ps(14.9f * width), 2); /* the smaller size, x's sign */
    __m512i place = (__m512i)(inside * (1 / width) + 0x1.8p23f);
    vector part[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        part[i] = (vector)_mm512_permutex2var_ps(_mm512_load_ps(pieces[i]), place, _mm512_load_ps(pieces[i] + 16));
    return ((part[3] * inside + part[2]) * inside + part[1]) * x + part[0];
}
