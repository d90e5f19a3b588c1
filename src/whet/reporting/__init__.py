"""Progress lines, tables, plots and HTML pages. This package renders results that others computed."""
