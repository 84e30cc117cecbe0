"""The quick start's picture: two loss curves on each other, and where the daemon was killed. SVG without a library."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 320, 52, 16, 34, 42


def _path(losses, x, y):
    return " ".join(f"{'L' if i else 'M'}{x(i + 1):.1f},{y(loss):.1f}" for i, loss in enumerate(losses))


def draw(torch_losses: list[float], our_losses: list[float], killed_at: int, title: str) -> str:
    steps = len(our_losses)
    top = max(*torch_losses, *our_losses)
    x = lambda step: _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - 1) / max(1, steps - 1)  # noqa: E731
    y = lambda loss: _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - loss / top)  # noqa: E731
    floor = _HEIGHT - _BOTTOM
    marks = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(n):.1f}" y2="{y(n):.1f}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 8}" y="{y(n) + 4:.1f}" text-anchor="end">{n}</text>'
        for n in range(int(top) + 1)
    ]
    marks += [
        f'<text x="{x(step):.1f}" y="{floor + 18}" text-anchor="middle">{step}</text>'
        for step in range(10, steps + 1, 10)
    ]
    killed = x(killed_at)
    legend = _WIDTH - _RIGHT - 250
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"
  font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="white"/>
<text x="{_LEFT}" y="20" font-size="14">{title}</text>
{"".join(marks)}
<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>
<text transform="translate(14,{floor / 2:.0f}) rotate(-90)" text-anchor="middle">loss</text>
<line x1="{killed:.1f}" x2="{killed:.1f}" y1="{_TOP}" y2="{floor}" stroke="#c00" stroke-dasharray="4 3"/>
<text x="{killed + 6:.1f}" y="{floor - 8}" fill="#c00">kill -9 of the daemon</text>
<path d="{_path(torch_losses, x, y)}" fill="none" stroke="#f5a623" stroke-width="7" stroke-linejoin="round"/>
<path d="{_path(our_losses, x, y)}" fill="none" stroke="#1a4fa0" stroke-width="2" stroke-linejoin="round"/>
<line x1="{legend}" x2="{legend + 28}" y1="48" y2="48" stroke="#f5a623" stroke-width="7"/>
<text x="{legend + 36}" y="52">torch.optim.AdamW on fp32 masters</text>
<line x1="{legend}" x2="{legend + 28}" y1="68" y2="68" stroke="#1a4fa0" stroke-width="2"/>
<text x="{legend + 36}" y="72">superoffload</text>
</svg>
"""
