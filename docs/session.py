#!/usr/bin/env python3
"""Makes docs/session.svg, an animation, of the recorded session in docs/session.md.

usage: session.py <docs/session.md >docs/session.svg

It shows the commands named below with the last lines of what each has printed. Lines that are left
out or cut are marked. It invents nothing: a command that the recording does not have is an error.
"""
import html
import re
import sys

# Section of the recording, title of the scene, and its commands: how each begins, and how many of
# its last lines of output are shown.
SCENES = [
    ("Install the package", "install the package", [("dpkg -i", 5)]),
    ("Add the handler to containerd", "add its handler to containerd", [
        ("pause-sandboxer enable", 5), ("pause-sandboxer check", 5)]),
    ("Run a test pod", "run a test pod", [("pause-sandboxer selftest", 12)]),
    ("In a cluster", "a pod of kubectl, in a cluster", [
        ("kubectl apply", 2), ("kubectl get pods", 3), ("pause-sandboxer list", 2),
        ("kubectl exec", 1)]),
    ("Restart both daemons", "restart both daemons: the pod keeps running", [
        ("systemctl restart pause-sandboxer.service", 0), ("systemctl restart containerd", 0),
        ("pause-sandboxer list", 2), ("crictl create", 1), ("crictl start", 1)]),
    ("Undo it", "undo it", [
        ("crictl rmp", 2), ("pause-sandboxer disable", 5), ("apt-get -qq purge", 2)]),
]
# Those of src/cli/colour.rs: what was recorded went to a pipe, which gets none.
COLOURS = {
    "pause-sandboxer check": [
        (r"^ok", "k"), (r"^warn", "y"), (r"^FAIL", "f"), (r"^      -&gt;", "h")],
    "pause-sandboxer list": [(r"(?<=  )ready(?=  )", "k")],
}
# What viewers without animation show.
STILL = "In a cluster"
COLUMNS, ROWS = 100, 13
CHAR, LINE, LEFT, TOP = 8.0, 20, 20, 62
WIDTH, HEIGHT = round(COLUMNS * CHAR) + 2 * LEFT, TOP + ROWS * LINE
# Seconds: before a command, after its output, and at the end of a scene.
TYPING, READING, PAUSE = 0.7, 0.9, 2.5


def recorded(text):
    """The sections of the recording: a list of commands with their lines of output."""
    sections, inside = {}, False
    for line in text.splitlines():
        if line.startswith("## "):
            commands = sections[line[3:]] = []
        elif line == "```":
            inside = not inside
        elif inside and line.startswith("# "):
            commands.append((line[2:], []))
        elif inside:
            commands[-1][1].append(line)
    return sections


def lines_of(section, commands):
    """Steps of a scene, one for each command: rows of class and text, the command's the first."""
    steps, at = [], 0
    for begins, most in commands:
        rest = [i for i in range(at, len(section)) if section[i][0].startswith(begins)]
        if not rest:
            sys.exit(f"session.py: the recording has no {begins!r} where it is expected")
        (command, output), at = section[rest[0]], rest[0] + 1
        shown = output[len(output) - most:]
        rows = [("c", command)]
        if most and len(output) > most:
            # The mark takes the place of one line.
            shown = shown[1:]
            rows.append(("o", f"[{len(output) - len(shown)} lines left out]"))
        rows += [(command, line) for line in shown]
        steps.append(rows)
    return steps


def cut(text, columns):
    return text if len(text) <= columns else text[:columns - 1] + "…"


def painted(command, text):
    text = html.escape(cut(text, COLUMNS), False)
    for pattern, kind in COLOURS.get(command, []):
        text = re.sub(pattern, rf'<tspan class="{kind}">\g<0></tspan>', text)
    return text


def row(kind, text, number):
    y = TOP + number * LINE
    begin = f'<text x="{LEFT}" y="{y}"'
    if kind == "c":
        command = html.escape(cut(text, COLUMNS - 2), False)
        return f'{begin}><tspan class="p"># </tspan>{command}</text>'
    return f'{begin} class="o">{painted(kind, text)}</text>'


def main():
    sections = recorded(sys.stdin.read())
    scenes, clock = [], 0.0
    for heading, title, commands in SCENES:
        begin, number, steps = clock, 0, []
        clock += 0.4
        for rows in lines_of(sections[heading], commands):
            prompt, output = rows[0], rows[1:]
            steps.append((clock, [row(*prompt, number)]))
            clock += TYPING
            number += 1
            if output:
                steps.append((clock, [row(*line, number + i) for i, line in enumerate(output)]))
                number += len(output)
                clock += READING
        assert number <= ROWS, f"{title}: {number} rows"
        clock += PAUSE
        scenes.append((heading, title, begin, clock, steps))

    def percent(moment):
        return f"{100 * moment / clock:.2f}%"

    style, body, names = [], [], 0
    for index, (heading, title, begin, end, steps) in enumerate(scenes):
        scene = '<g class="still">' if heading == STILL else "<g>"
        last = index == len(scenes) - 1
        for moment, rows in [(begin, None)] + steps:
            names += 1
            until = "" if last else f"{percent(end)},to{{opacity:0}}"
            shown = f"{percent(moment)}{',to' if last else ''}{{opacity:1}}"
            start = "" if moment == 0 else "0%{opacity:0}"
            style.append(f"@keyframes a{names}{{{start}{shown}{until}}}"
                         f"#a{names}{{animation-name:a{names}}}")
            if rows is None:
                body.append(f'{scene}<text id="a{names}" class="t a" x="{WIDTH // 2}" y="26">'
                            f"{html.escape(title)}</text>")
            else:
                body.append(f'<g id="a{names}" class="a">' + "\n".join(rows) + "</g>")
        body.append("</g>")

    style, body = "\n".join(style), "\n".join(body)
    sys.stdout.write(f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" xml:space="preserve" role="img"
 aria-label="A recorded terminal session with pause-sandboxer; docs/session.md has its text">
<!-- Made from docs/session.md by docs/session.py. -->
<style>
.w{{fill:#f6f8fa;stroke:#d0d7de}}.b{{fill:#d0d7de}}
text{{font:13.2px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}}
text{{fill:#1f2328}}
.t{{font-weight:bold;text-anchor:middle;fill:#57606a}}.p{{fill:#0969da}}.o{{fill:#424a53}}
.k{{fill:#1a7f37}}.y{{fill:#9a6700}}.f{{fill:#cf222e}}.h{{fill:#1b7c83}}
@media (prefers-color-scheme:dark){{
.w{{fill:#0d1117;stroke:#30363d}}.b{{fill:#30363d}}text{{fill:#f0f6fc}}.t{{fill:#8b949e}}
.p{{fill:#58a6ff}}.o{{fill:#b6bec8}}.k{{fill:#3fb950}}.y{{fill:#d29922}}
.f{{fill:#ff7b72}}.h{{fill:#39c5cf}}
}}
.a{{opacity:0;animation:{clock:.1f}s step-end infinite}}.still .a{{opacity:1}}
{style}
@media (prefers-reduced-motion:reduce){{.a{{animation:none!important}}}}
</style>
<rect class="w" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>
<circle class="b" cx="22" cy="21" r="6"/><circle class="b" cx="42" cy="21" r="6"/>
<circle class="b" cx="62" cy="21" r="6"/>
{body}
</svg>
""")


main()
