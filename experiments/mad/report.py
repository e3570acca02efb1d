def table(rows):
    return str(len(rows))
