"""The machine below: files, folders, the hub, devices, processes and the C compiler."""
