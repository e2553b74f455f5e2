from razorctl.cli import run

run()
