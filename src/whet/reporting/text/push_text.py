"""The files of an upload as text."""

from whet.reporting.formatting import align_columns, format_file_size
from whet.runs.push import Push


def push_text(push: Push) -> str:
    """Return the files with their sizes, the total, and where they were uploaded."""
    rows = [(file.name, format_file_size(file.size)) for file in push.files]
    total = (f"{len(push.files)} files", format_file_size(push.size))
    lines = [align_columns([*rows, total])]
    changed = [file.name for file in push.files if file.content is not None]
    if changed:
        lines.append(f"adapted to the repository: {', '.join(changed)}")
    if push.left_out:
        lines.append(f"left out: {', '.join(push.left_out)}")
    if push.url is None:
        lines.append(f"dry run: nothing was uploaded to {push.repository}")
    else:
        lines.append(f"uploaded: {push.url}")
    return "\n".join(lines)
